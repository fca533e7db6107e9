//! Running the jobs of a plan, and writing outputs.

use super::dtype::{read_element, write_element};
use super::kernels::{ROW_ALIGN, Storage, TILE};
use super::merge::State;
use super::plan::{Job, Plan};
use super::request::Checked;
use super::scratch::{Scratch, with_scratch};
use super::{Dtype, KvScale, ThreadPool};

mod strip;

use strip::StripRun;

/// Sizes that all jobs of a call share.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    num_heads: usize,
    group: usize,
    block_size: usize,
    head_dim: usize,
    value_dim: usize,
    /// Padded to [`ROW_ALIGN`].
    key_pad: usize,
    value_pad: usize,
    /// Keys of a tile: 16 rows of fp32 or 32 narrower ones, which was the fastest of 16, 32 and 64 for each. It
    /// depends on the dtype alone, so that results do not depend on how a batch is put together.
    tile: usize,
    /// Lanes of the order of pairs in which bf16 elements are held; 0 for their own order.
    pairs: usize,
}

/// How the kernels reach stored rows: in place, or decoded to fp32 first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    InPlace(Storage),
    Staged,
}

/// Partial states: `[num_slots, num_query_heads]` of (max, sum, `value_dim` floats).
struct Partials {
    start: *mut f32,
    num_heads: usize,
    value_dim: usize,
}

// SAFETY: jobs write disjoint states, and they are read after all jobs are done.
unsafe impl Sync for Partials {}

impl Partials {
    /// One state.
    ///
    /// # Safety
    /// Slot and head are inside the buffer, and nobody else uses the state meanwhile.
    unsafe fn state(&self, slot: usize, head: usize) -> State<'_> {
        let offset = (slot * self.num_heads + head) * (self.value_dim + 2);
        // SAFETY: by the caller's promise.
        unsafe {
            let start = self.start.add(offset);
            let acc = std::slice::from_raw_parts_mut(start.add(2), self.value_dim);
            State { max: &mut *start, sum: &mut *start.add(1), acc }
        }
    }
}

/// Floats of the partial states that a plan leaves.
pub(super) fn partial_floats(checked: &Checked<'_>, plan: &Plan) -> usize {
    let [_, num_query_heads, _] = checked.request.query.shape();
    plan.num_slots * num_query_heads * (checked.request.v_cache.shape()[3] + 2)
}

/// Computes a checked request. `partials` has room for [`partial_floats`] initialised floats.
pub(super) fn run(checked: &Checked<'_>, plan: &Plan, partials: *mut f32, threads: &ThreadPool) {
    let shape = Shape::of(checked);
    clear_unseen(checked, &shape);
    let partials =
        Partials { start: partials, num_heads: shape.num_heads * shape.group, value_dim: shape.value_dim };
    let call = Call { checked, plan, shape, partials };
    let work = |index: usize| with_scratch(|scratch| call.run_job(&plan.jobs[index], scratch));
    if threads.size() == 1 {
        (0..plan.jobs.len()).for_each(work);
    } else {
        threads.run(plan.jobs.len(), &work);
    }
    if plan.num_slots > 0 {
        let tokens = call.tokens_with_partials();
        threads.run(tokens.len(), &|index| call.merge_token(&tokens[index]));
    }
}

impl Shape {
    fn of(checked: &Checked<'_>) -> Self {
        let [_, block_size, num_heads, head_dim] = checked.request.k_cache.shape();
        let value_dim = checked.request.v_cache.shape()[3];
        let span = 2 * checked.kernels.lanes;
        let even = head_dim.is_multiple_of(span) && value_dim.is_multiple_of(span);
        let pairs = if checked.request.k_cache.dtype() == Dtype::Bf16 && even { span / 2 } else { 0 };
        Self {
            pairs,
            tile: if checked.request.k_cache.dtype() == Dtype::F32 { TILE / 2 } else { TILE },
            num_heads,
            group: checked.group,
            block_size,
            head_dim,
            value_dim,
            key_pad: head_dim.next_multiple_of(ROW_ALIGN),
            value_pad: value_dim.next_multiple_of(ROW_ALIGN),
        }
    }

    /// Where element `index` of a row is held.
    fn place(&self, index: usize) -> usize {
        if self.pairs == 0 {
            return index;
        }
        let inside = index % (2 * self.pairs);
        index - inside + inside % 2 * self.pairs + inside / 2
    }
}

/// Writes zeros for tokens that see nothing: padding, and sequences of length 0.
fn clear_unseen(checked: &Checked<'_>, shape: &Shape) {
    let [num_tokens, num_heads, _] = checked.request.query.shape();
    let mut seen = vec![false; num_tokens];
    for row in &checked.rows {
        seen[row.token] = true;
    }
    for token in (0..num_tokens).filter(|&token| !seen[token]) {
        for head in 0..num_heads {
            let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
            let state = State { max: &mut max, sum: &mut sum, acc: &mut [] };
            write_output(checked, shape, token, head, &state);
        }
    }
}

/// Writes a head's output and log-sum-exp; elements past the accumulator become zero.
fn write_output(checked: &Checked<'_>, shape: &Shape, token: usize, head: usize, state: &State<'_>) {
    let request = checked.request;
    let sink = request.options.sinks.map(|sinks| sinks[head]);
    let (factor, lse) = state.finish(sink);
    let factor = factor * request.v_scale.of_head(head / checked.group);
    let target = request.out.at([token, head, 0]);
    let stride = request.out.strides()[2];
    let dtype = request.out.dtype();
    for index in 0..request.out.shape()[2] {
        let value = state.acc.get(shape.place(index)).map_or(0.0, |value| value * factor);
        // SAFETY: inside `out`, whose shape was checked; each row is written by one job.
        unsafe { write_element(dtype, target.wrapping_offset(index as isize * stride), value) };
    }
    if let Some(target) = &request.lse {
        // SAFETY: as above.
        unsafe { write_element(Dtype::F32, target.at([token, head]), lse) };
    }
}

struct Call<'a> {
    checked: &'a Checked<'a>,
    plan: &'a Plan,
    shape: Shape,
    partials: Partials,
}

/// A token and its partials: the slots of each strip that it is in, in the order of their keys.
struct TokenPartials {
    token: usize,
    strips: Vec<Vec<usize>>,
}

impl Call<'_> {
    fn access(&self) -> Access {
        let request = self.checked.request;
        let storage = match request.k_cache.dtype() {
            Dtype::F32 => Storage::F32,
            Dtype::F16 => Storage::F16,
            Dtype::Bf16 if self.shape.pairs > 0 => Storage::Bf16Pairs,
            Dtype::Bf16 => Storage::Bf16,
            _ => return Access::Staged,
        };
        let dense = request.k_cache.has_dense_rows() && request.v_cache.has_dense_rows();
        let whole = self.shape.key_pad == self.shape.head_dim && self.shape.value_pad == self.shape.value_dim;
        if dense && whole { Access::InPlace(storage) } else { Access::Staged }
    }

    fn run_job(&self, job: &Job, scratch: &mut Scratch) {
        let strip = &self.checked.strips[job.strip];
        let mut run = StripRun::new(self, job, scratch);
        match job.piece {
            Some(number) => run.attend_piece(strip.pieces().nth(number).unwrap_or(0..0), false),
            None => strip.pieces().enumerate().for_each(|(i, piece)| run.attend_piece(piece, i > 0)),
        }
        run.store(job.partial.map(|partial| self.plan.partial_start[partial]));
    }

    fn tokens_with_partials(&self) -> Vec<TokenPartials> {
        let num_tokens = self.checked.request.query.shape()[0];
        let mut of_token: Vec<Vec<Vec<usize>>> = vec![Vec::new(); num_tokens];
        for (strip, partials) in self.checked.strips.iter().zip(&self.plan.strip_partials) {
            if partials.is_empty() {
                continue;
            }
            for (index, row) in self.checked.rows[strip.rows.clone()].iter().enumerate() {
                let slots = partials.clone().map(|partial| self.plan.partial_start[partial] + index);
                of_token[row.token].push(slots.collect());
            }
        }
        let tokens = of_token.into_iter().enumerate().map(|(token, strips)| TokenPartials { token, strips });
        tokens.filter(|token| !token.strips.is_empty()).collect()
    }

    /// Merges the pieces of each strip, then the strips, and writes the token's outputs.
    fn merge_token(&self, token: &TokenPartials) {
        for head in 0..self.shape.num_heads * self.shape.group {
            // SAFETY: all jobs are done, slots are inside the buffer, and this token's states are used by this
            // call only; the first of a strip gathers the others, which are different slots.
            unsafe {
                for slots in &token.strips {
                    let mut first = self.partials.state(slots[0], head);
                    for &slot in &slots[1..] {
                        let other = self.partials.state(slot, head);
                        first.merge(*other.max, *other.sum, other.acc);
                    }
                }
                let mut total = self.partials.state(token.strips[0][0], head);
                for slots in &token.strips[1..] {
                    let other = self.partials.state(slots[0], head);
                    total.merge(*other.max, *other.sum, other.acc);
                }
                write_output(self.checked, &self.shape, token.token, head, &total);
            }
        }
    }
}

/// Reads an element of a strided row.
///
/// # Safety
/// Element `index` of the row is readable.
unsafe fn read_strided(dtype: Dtype, row: *const u8, stride: isize, index: usize) -> f32 {
    // SAFETY: by the caller's promise.
    unsafe { read_element(dtype, row.wrapping_offset(index as isize * stride)) }
}

/// The factor of one stored row that is not folded into scores or outputs.
fn token_factor(scale: &KvScale<'_>, block: usize, offset: usize, head: usize) -> f32 {
    match scale {
        // SAFETY: inside the array, whose shape was checked against the cache's.
        KvScale::TokenHead(scales) => unsafe { read_element(Dtype::F32, scales.at([block, offset, head])) },
        _ => 1.0,
    }
}
