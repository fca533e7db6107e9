//! Putting attention over disjoint key ranges together.
//!
//! A state is (max, sum, acc): the largest score, the sum of `exp(score - max)`, and the values weighted by the
//! same. Merging is exact up to rounding, and keeps the order of its operands.

use super::dtype::{read_element, write_element};
use super::{Dtype, Tensor, ThreadPool};
use crate::Result;

/// A state that borrows its accumulator.
pub(super) struct State<'a> {
    pub(super) max: &'a mut f32,
    pub(super) sum: &'a mut f32,
    pub(super) acc: &'a mut [f32],
}

impl State<'_> {
    /// Adds the keys of another state.
    pub(super) fn merge(&mut self, max: f32, sum: f32, acc: &[f32]) {
        if max == f32::NEG_INFINITY {
            return;
        }
        let highest = if max > *self.max { max } else { *self.max };
        let (own, other) = ((*self.max - highest).exp(), (max - highest).exp());
        *self.max = highest;
        *self.sum = *self.sum * own + sum * other;
        for (mine, theirs) in self.acc.iter_mut().zip(acc) {
            *mine = *mine * own + theirs * other;
        }
    }

    /// The factor that turns the accumulator into the output, and the log-sum-exp. `sink` joins the sum.
    pub(super) fn finish(&self, sink: Option<f32>) -> (f32, f32) {
        let highest = sink.map_or(*self.max, |sink| sink.max(*self.max));
        if highest == f32::NEG_INFINITY {
            return (0.0, f32::NEG_INFINITY);
        }
        let own = (*self.max - highest).exp();
        let sum = *self.sum * own + sink.map_or(0.0, |sink| (sink - highest).exp());
        (own / sum, highest + sum.ln())
    }
}

/// Merges two outputs over disjoint keys, weighted by their log-sum-exps; -inf stands for no keys.
///
/// Outputs are `[num_tokens, num_heads, value_dim]`, log-sum-exps `[num_tokens, num_heads]` in fp32. The targets
/// may be the sources.
///
/// # Errors
/// `InvalidArgument` for shapes or dtypes that do not fit; nothing is written then.
pub fn merge_states(
    a: (&Tensor<3>, &Tensor<2>),
    b: (&Tensor<3>, &Tensor<2>),
    to: (&Tensor<3>, &Tensor<2>),
    threads: &ThreadPool,
) -> Result<()> {
    let [num_tokens, num_heads, _] = a.0.shape();
    for (suffix, (out, lse)) in [("_a", a), ("_b", b), ("", to)] {
        out.require_shape(&format!("out{suffix}"), a.0.shape())?;
        out.require_dtype(&format!("out{suffix}"), &[Dtype::F32, Dtype::F16, Dtype::Bf16])?;
        lse.require_shape(&format!("lse{suffix}"), [num_tokens, num_heads])?;
        lse.require_dtype(&format!("lse{suffix}"), &[Dtype::F32])?;
    }
    to.0.require_writable("out")?;
    to.1.require_writable("lse")?;
    threads.run(num_tokens, &|token| {
        for head in 0..num_heads {
            merge_row(a, b, to, [token, head]);
        }
    });
    Ok(())
}

fn merge_row(
    a: (&Tensor<3>, &Tensor<2>),
    b: (&Tensor<3>, &Tensor<2>),
    to: (&Tensor<3>, &Tensor<2>),
    at: [usize; 2],
) {
    let read = |lse: &Tensor<2>| {
        // SAFETY: `at` is inside the shape, which was checked.
        unsafe { read_element(Dtype::F32, lse.at(at)) }
    };
    let (lse_a, lse_b) = (read(a.1), read(b.1));
    let highest = if lse_a > lse_b { lse_a } else { lse_b };
    let empty = highest == f32::NEG_INFINITY;
    let (own, other) = if empty { (0.0, 0.0) } else { ((lse_a - highest).exp(), (lse_b - highest).exp()) };
    let sum = own + other;
    for index in 0..a.0.shape()[2] {
        let at = [at[0], at[1], index];
        // SAFETY: `at` is inside the shapes, which are equal. A part without weight is not read: it may hold
        // anything.
        unsafe {
            let left = if own == 0.0 { 0.0 } else { own * read_element(a.0.dtype(), a.0.at(at)) };
            let right = if other == 0.0 { 0.0 } else { other * read_element(b.0.dtype(), b.0.at(at)) };
            write_element(to.0.dtype(), to.0.at(at), if empty { 0.0 } else { (left + right) / sum });
        }
    }
    // SAFETY: as above.
    unsafe { write_element(Dtype::F32, to.1.at(at), if empty { highest } else { highest + sum.ln() }) };
}
