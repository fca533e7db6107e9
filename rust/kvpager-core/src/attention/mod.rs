//! Paged attention, KV append and block copies on host memory.
//!
//! One layout: caches `[num_blocks, block_size, num_kv_heads, head_dim]`, K and V apart, any strides. A call of
//! [`PagedAttention::run`] goes through three files:
//!
//! 1. `request.rs` checks every shape, length and block id and copies the used part of the block tables;
//! 2. `plan.rs` cuts the batch into jobs by sequence, query rows, KV heads and key ranges;
//! 3. `job.rs` runs them on a [`ThreadPool`], tile by tile (`kernels/`), and `merge.rs` puts key ranges together.
//!
//! Results are the same bits for every number of threads and however a batch is put together: tiles and ranges
//! are cut at fixed positions of the sequence, and each row's arithmetic does not depend on its neighbours.
//! Accumulation is in fp32. A slot outside the visible range is never read.

mod append;
mod batch;
mod blocks;
mod dtype;
mod groups;
mod job;
mod kernels;
mod merge;
mod plan;
mod request;
mod scale;
mod scratch;
mod tensor;
mod threads;

pub use append::{Append, Side, append_kv};
pub use batch::BatchView;
pub use blocks::{check_block_moves, copy_blocks, gather_blocks, scatter_blocks, zero_blocks};
pub use dtype::Dtype;
pub use groups::{PrefixGroups, prefix_groups};
pub use kernels::instruction_sets;
pub use merge::merge_states;
pub use request::{Options, PagedAttention, SharedPrefixes};
pub use scale::KvScale;
pub use tensor::{Int32Matrix, Tensor};
pub use threads::ThreadPool;
