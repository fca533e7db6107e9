//! The memory side of an LLM inference server.
//!
//! The crate knows how many KV blocks fit on a device ([`geometry`]), owns every block ([`block_pool`]) and
//! every block table ([`block_tables`]), finds reusable prefixes inside a tenant's namespace
//! ([`prefix_index`]), decides what runs in the next step ([`scheduler`]), and computes paged attention on
//! the CPU ([`attention`]). It names no Python, NumPy or CUDA.

pub mod attention;
pub mod block_pool;
pub mod block_tables;
pub mod error;
pub mod geometry;
pub mod ids;
mod memory;
pub mod prefix_index;
#[cfg(not(loom))]
pub mod replay;
#[cfg(not(loom))]
pub mod scheduler;
pub mod split_plan;
#[cfg(not(any(loom, shuttle)))]
pub mod stress;
pub mod sync;
#[cfg(not(loom))]
mod ticks;

pub use error::{Error, HandleFault, Result, count, count_of};
pub use ids::{AccountId, BlockHandle, BlockId, NamespaceId, SequenceId, StepId};
