//! What a call of paged attention gets, and every check of it.

use super::batch::BatchView;
use super::kernels::{self, Kernels};
use super::plan::{Row, Strip};
use super::scratch::{CACHE_LINE, FloatBuffer};
use super::{Dtype, Int32Matrix, KvScale, Tensor, ThreadPool, job, plan};
use crate::{Error, Result};
use std::mem::MaybeUninit;

/// How scores are formed and masked.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// Factor of the products.
    pub scale: f32,
    /// Whether a query sees nothing past its own position.
    pub causal: bool,
    /// Keys that a query sees at most, its own position included: positions above `position - window`.
    pub window: Option<u32>,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// `[num_query_heads]`: adds `slope * (key position - query position)`.
    pub alibi_slopes: Option<&'a [f32]>,
    /// `[num_query_heads]`: the logit of an extra key without a value.
    pub sinks: Option<&'a [f32]>,
    /// Name of the instruction set (see [`super::instruction_sets`]); the fastest if absent.
    pub instruction_set: Option<&'a str>,
}

/// Prefixes that several sequences of the batch share, each read once for all of them.
#[derive(Clone, Copy, Debug)]
pub struct SharedPrefixes<'a> {
    /// `[num_groups + 1]`: ranges of `sequences`.
    pub group_start: &'a [i32],
    /// Indices of the members, each at most once.
    pub sequences: &'a [i32],
    /// `[num_groups]`: tokens shared, a multiple of the block size, and before every member's first query.
    pub prefix_lens: &'a [i32],
}

/// One ragged batch of attention.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention<'a> {
    /// `[num_tokens, num_query_heads, head_dim]`.
    pub query: Tensor<3>,
    /// `[num_blocks, block_size, num_kv_heads, head_dim]`.
    pub k_cache: Tensor<4>,
    /// `[num_blocks, block_size, num_kv_heads, value_dim]`.
    pub v_cache: Tensor<4>,
    /// Scale of the keys.
    pub k_scale: KvScale<'a>,
    /// Scale of the values.
    pub v_scale: KvScale<'a>,
    /// `[rows, max_blocks]`; entries outside a sequence's visible range are not read.
    pub block_tables: Int32Matrix,
    /// `[num_sequences]`: each sequence's row; the sequence's own index if absent.
    pub table_rows: Option<&'a [i32]>,
    /// `[num_sequences + 1]`: ranges of query tokens. Tokens past the last range get zeros.
    pub query_start: &'a [i32],
    /// `[num_sequences]`: tokens in the cache, those of the query included. 0: the sequence's rows get zeros.
    pub context_lens: &'a [i32],
    /// Shared prefixes, for a cascade.
    pub shared: Option<SharedPrefixes<'a>>,
    /// Scores and masks.
    pub options: Options<'a>,
    /// `[num_tokens, num_query_heads, value_dim]`, written.
    pub out: Tensor<3>,
    /// `[num_tokens, num_query_heads]`, fp32, written: logarithm of the sum of exponentials, the head's sink included;
    /// where no key is seen -inf, or the sink.
    pub lse: Option<Tensor<2>>,
}

/// A checked request: query rows, strips of them with the blocks they read, all inside their arrays.
pub(super) struct Checked<'a> {
    pub(super) request: &'a PagedAttention<'a>,
    pub(super) kernels: &'static Kernels,
    pub(super) group: usize,
    pub(super) rows: Vec<Row>,
    pub(super) strips: Vec<Strip>,
    /// Block ids of the strips.
    pub(super) blocks: Vec<u32>,
    /// Whether a token may be in several strips.
    pub(super) cascades: bool,
}

/// Checks a number a query head.
fn check_head_values(
    name: &str,
    values: Option<&[f32]>,
    num_heads: usize,
    allowed: fn(f32) -> bool,
) -> Result<()> {
    let Some(values) = values else { return Ok(()) };
    if values.len() != num_heads {
        return Err(Error::invalid(format!(
            "{name} has {}, expected {num_heads} (one a query head)",
            crate::count_of(values.len(), "entry")
        )));
    }
    match values.iter().position(|&value| !allowed(value)) {
        Some(at) => Err(Error::invalid(format!("{name}[{at}] is {}, expected a finite number", values[at]))),
        None => Ok(()),
    }
}

const WIDE: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

impl PagedAttention<'_> {
    /// Computes the batch on the pool's threads.
    ///
    /// # Errors
    /// `InvalidArgument` for shapes, dtypes, lengths or block ids that do not fit; nothing is written then.
    pub fn run(&self, threads: &ThreadPool) -> Result<()> {
        let checked = self.check()?;
        let plan = plan::plan(&checked, threads.size());
        let mut partials = FloatBuffer::default();
        let start = partials.reserve(job::partial_floats(&checked, &plan));
        job::run(&checked, &plan, start, threads);
        Ok(())
    }

    /// [`Self::run`] with the partial results of split work in the caller's memory.
    ///
    /// # Errors
    /// As there, and when the workspace is smaller than [`Self::workspace_bytes`] says for so many threads; nothing
    /// is written then.
    pub fn run_in(&self, workspace: &mut [MaybeUninit<u8>], threads: &ThreadPool) -> Result<()> {
        let checked = self.check()?;
        let plan = plan::plan(&checked, threads.size());
        let floats = job::partial_floats(&checked, &plan);
        let needed = bytes_of(floats);
        if workspace.len() < needed {
            return Err(Error::invalid(format!(
                "workspace has {}, this call needs {needed}",
                crate::count_of(workspace.len(), "byte")
            )));
        }
        job::run(&checked, &plan, aligned_floats(workspace, floats), threads);
        Ok(())
    }

    /// Bytes that [`Self::run_in`] needs for this call on so many threads; 0 where no work is split.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn workspace_bytes(&self, num_threads: usize) -> Result<usize> {
        let checked = self.check()?;
        Ok(bytes_of(job::partial_floats(&checked, &plan::plan(&checked, num_threads))))
    }

    fn check(&self) -> Result<Checked<'_>> {
        let group = self.check_arrays()?;
        self.check_options()?;
        let kernels = kernels::select(self.options.instruction_set).ok_or_else(|| {
            Error::invalid(format!(
                "instruction set {:?} is not one of this processor's: {}",
                self.options.instruction_set,
                kernels::instruction_sets().join(", ")
            ))
        })?;
        let lengths = self.batch().check_lengths()?;
        let cascades = self.shared.is_some();
        let mut checked =
            Checked { request: self, kernels, group, rows: vec![], strips: vec![], blocks: vec![], cascades };
        plan::lay_out(&mut checked, &lengths)?;
        Ok(checked)
    }

    /// Checks the arrays against each other; returns query heads a KV head.
    fn check_arrays(&self) -> Result<usize> {
        let [num_tokens, num_heads, head_dim] = self.query.shape();
        let [num_blocks, block_size, num_kv_heads, _] = self.k_cache.shape();
        let value_dim = self.v_cache.shape()[3];
        self.query.require_dtype("query", &WIDE)?;
        self.k_cache.require_shape("k_cache", [num_blocks, block_size, num_kv_heads, head_dim])?;
        self.v_cache.require_shape("v_cache", [num_blocks, block_size, num_kv_heads, value_dim])?;
        self.v_cache.require_dtype("v_cache", &[self.k_cache.dtype()])?;
        self.k_scale.check("k", &self.k_cache, false)?;
        self.v_scale.check("v", &self.v_cache, false)?;
        self.out.require_shape("out", [num_tokens, num_heads, value_dim])?;
        self.out.require_dtype("out", &WIDE)?;
        self.out.require_writable("out")?;
        if let Some(lse) = &self.lse {
            lse.require_shape("lse", [num_tokens, num_heads])?;
            lse.require_dtype("lse", &[Dtype::F32])?;
            lse.require_writable("lse")?;
        }
        if !block_size.is_power_of_two() || block_size > 256 {
            return Err(Error::invalid(format!(
                "block size is {block_size}, expected a power of two up to 256"
            )));
        }
        for (name, size) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if size == 0 || size > 1024 {
                return Err(Error::invalid(format!("{name} is {size}, expected 1 to 1024")));
            }
        }
        if num_kv_heads == 0 || num_heads == 0 || num_heads % num_kv_heads != 0 {
            return Err(Error::invalid(format!(
                "{num_heads} query heads cannot be shared evenly by {num_kv_heads} KV heads"
            )));
        }
        Ok(num_heads / num_kv_heads)
    }

    fn check_options(&self) -> Result<()> {
        let options = &self.options;
        let num_heads = self.query.shape()[1];
        if !options.scale.is_finite() {
            return Err(Error::invalid(format!("scale is {}, expected a finite number", options.scale)));
        }
        if options.window == Some(0) {
            return Err(Error::invalid("window is 0, expected at least 1 (the query's own position)"));
        }
        if let Some(cap) = options.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(Error::invalid(format!("softcap is {cap}, expected a positive finite number")));
        }
        check_head_values("alibi_slopes", options.alibi_slopes, num_heads, |slope| slope.is_finite())?;
        check_head_values("sinks", options.sinks, num_heads, |sink| sink < f32::INFINITY)?;
        Ok(())
    }

    /// What says which positions are read.
    pub(super) const fn batch(&self) -> BatchView<'_> {
        let [num_blocks, block_size, ..] = self.k_cache.shape();
        BatchView {
            num_tokens: self.query.shape()[0],
            num_blocks,
            block_size,
            block_tables: Some(&self.block_tables),
            table_rows: self.table_rows,
            query_start: self.query_start,
            context_lens: self.context_lens,
        }
    }
}

/// Bytes of a workspace for so many floats, room to align their start to a cache line included.
fn bytes_of(floats: usize) -> usize {
    if floats == 0 { 0 } else { floats * size_of::<f32>() + CACHE_LINE - 1 }
}

/// The first cache line of a workspace, made floats whose bytes are initialised.
fn aligned_floats(workspace: &mut [MaybeUninit<u8>], floats: usize) -> *mut f32 {
    if floats == 0 {
        return std::ptr::NonNull::dangling().as_ptr();
    }
    let skipped = workspace.as_ptr().addr().next_multiple_of(CACHE_LINE) - workspace.as_ptr().addr();
    let bytes = &mut workspace[skipped..skipped + floats * size_of::<f32>()];
    bytes.fill(MaybeUninit::new(0));
    bytes.as_mut_ptr().cast()
}
