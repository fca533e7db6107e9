//! How long a step takes in virtual time.

use crate::{Error, Result};

/// `max(floor, per_token * tokens) + per_kv_token * kv_tokens`, in seconds.
///
/// The floor is reading the weights once, `per_token` the arithmetic of a prompt token, `per_kv_token` reading
/// one token's K and V.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Shortest step, seconds.
    pub floor: f64,
    /// Seconds a token of the batch.
    pub per_token: f64,
    /// Seconds a token of context that the batch reads.
    pub per_kv_token: f64,
    /// Seconds a block that is copied to or from the host.
    pub per_swapped_block: f64,
}

impl Default for StepTime {
    /// An 8-billion-parameter GQA model on one HBM3 GPU; an illustration, not a measurement.
    fn default() -> Self {
        Self { floor: 4.8e-3, per_token: 4e-5, per_kv_token: 3.9e-8, per_swapped_block: 0.0 }
    }
}

impl StepTime {
    /// Seconds of one step.
    #[must_use]
    pub fn seconds(&self, num_tokens: u64, kv_tokens: u64, swapped_blocks: u64) -> f64 {
        self.floor.max(self.per_token * num_tokens as f64)
            + self.per_kv_token * kv_tokens as f64
            + self.per_swapped_block * swapped_blocks as f64
    }

    /// Checks that time only goes on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the coefficients.
    pub fn validate(&self) -> Result<()> {
        let all = [self.floor, self.per_token, self.per_kv_token, self.per_swapped_block];
        if self.floor > 0.0 && all.iter().all(|x| x.is_finite() && *x >= 0.0) {
            return Ok(());
        }
        Err(Error::invalid(format!("step time {all:?}: the floor must be above 0, the rest at least 0")))
    }
}
