//! `forecast`: admit while the batch, as it will grow and end, is likely to fit.
//!
//! What must stay free is the larger of two estimates, both in blocks, over the batch with the request in it:
//!
//! ```text
//! peak   = max over t of  mean(t) + deviations * sd(t) - held     what will be needed at once
//! spread = growth_spread * sqrt(sum of E[remaining^2 | age])      how far single outputs may run
//! ```
//!
//! The peak sees a young batch that will grow together, and a shift of the workload; the spread sees a mature one
//! whose luck may turn. Both grow more slowly than the batch. See `survival.rs` for what is learned.

use super::AdmissionRoom;

/// Parameters of `forecast`. One setting for all workloads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForecastConfig {
    /// Share of the pool that stays uncommitted whatever is expected.
    pub free_share: f64,
    /// Standard deviations above the mean of the memory to come for which there must be room.
    pub deviations: f64,
    /// Root mean squares of the growth of single sequences for which there must be room.
    pub growth_spread: f64,
}

impl Default for ForecastConfig {
    fn default() -> Self {
        Self { free_share: 0.02, deviations: 1.0, growth_spread: 0.65 }
    }
}

impl ForecastConfig {
    pub(super) fn blocks_to_leave(self, room: &AdmissionRoom) -> u64 {
        let peak = f64::from(room.growth.peak_growth(self.deviations as f32));
        let spread = self.growth_spread * f64::from(room.growth.spread());
        (room.capacity_blocks as f64 * self.free_share + peak.max(spread)).ceil() as u64
    }
}
