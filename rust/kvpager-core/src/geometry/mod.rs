//! KV-cache geometry of a model, and the memory budget that turns device bytes into blocks.
//!
//! [`ModelShape`] is what a released `config.json` says: which layers keep K and V, for how many tokens, in how
//! many heads. [`KvGeometry`] adds how it is deployed (KV dtype, tensor and pipeline parallel) and splits the
//! layers into groups of equal bytes, one block table row each. [`Budget`] names every part of the device's
//! memory and says where its number comes from. What cannot be sized (state-space layers, cross attention,
//! sparse indexers) is refused with the field that shows it, never guessed. See `docs/notes/replay.md`.

mod batch_arrays;
mod budget;
mod config;
mod dtype;
mod families;
mod fields;
mod groups;
mod kv;
mod layers;
mod shape;
mod weights;

pub use batch_arrays::{BatchArray, BatchLimits};
pub use budget::{Budget, BudgetInput, BudgetPart, Origin};
pub use dtype::{KvDtype, KvScales};
pub use groups::LayerGroup;
pub use kv::{CachedLayer, GeometryOptions, KvGeometry};
pub use shape::{Layer, LayerCache, ModelShape, Span};
pub use weights::Weights;
