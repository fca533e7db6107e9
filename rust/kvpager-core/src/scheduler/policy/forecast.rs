//! `forecast`: leave room for what the running sequences may still grow, judged by finished outputs.
//!
//! The outputs that finished lately say how much a sequence of a given age still grows. Growth of different
//! sequences is independent and their ends give room back, so what must stay free is not the sum of what may
//! come but its uncertainty, which grows with the square root of the batch:
//!
//! ```text
//! leave >= free_share * capacity + deviations * sqrt(sum of E[remaining^2 | age]) / block_size
//! ```
//!
//! The window forgets, so a change of workload is followed within `WINDOW` requests; pseudo-samples keep the
//! estimate cautious while little is known and for ages that few outputs reach.

use super::AdmissionRoom;

/// Finished outputs that are remembered.
const WINDOW: usize = 2000;
/// Imaginary outputs in every estimate, each with at least `PRIOR_TOKENS` to go.
const PRIOR_WEIGHT: f64 = 4.0;
const PRIOR_TOKENS: f64 = 1000.0;
/// Finished outputs between two rebuilds of the sums.
const REBUILD_EVERY: usize = 32;

/// Parameters of `forecast`. One setting for all workloads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForecastConfig {
    /// Share of the pool that stays uncommitted whatever is expected.
    pub free_share: f64,
    /// Root mean squares of the remaining growth to leave room for.
    pub deviations: f64,
}

impl Default for ForecastConfig {
    fn default() -> Self {
        Self { free_share: 0.02, deviations: 0.75 }
    }
}

impl ForecastConfig {
    pub(super) fn blocks_to_leave(self, block_size: u32, room: AdmissionRoom) -> u64 {
        let margin = self.deviations * room.remaining_squared.sqrt() / f64::from(block_size);
        (room.capacity_blocks as f64 * self.free_share + margin).ceil() as u64
    }
}

/// Lengths of the outputs that finished lately.
#[derive(Clone, Debug)]
pub struct OutputLengths {
    /// Ring of the last lengths.
    recent: Vec<u32>,
    next: usize,
    since_rebuild: usize,
    /// The lengths in order, and for each position the sums over it and all longer ones.
    sorted: Vec<u32>,
    sums: Vec<f64>,
    squares: Vec<f64>,
}

impl Default for OutputLengths {
    fn default() -> Self {
        Self {
            recent: Vec::with_capacity(WINDOW),
            next: 0,
            since_rebuild: 0,
            sorted: Vec::with_capacity(WINDOW),
            sums: vec![0.0; WINDOW + 1],
            squares: vec![0.0; WINDOW + 1],
        }
    }
}

impl OutputLengths {
    /// Learns the length of an output that ended.
    pub fn learn(&mut self, num_tokens: u32) {
        if self.recent.len() < WINDOW {
            self.recent.push(num_tokens);
        } else {
            self.recent[self.next] = num_tokens;
            self.next = (self.next + 1) % WINDOW;
        }
        self.since_rebuild += 1;
        if self.since_rebuild >= REBUILD_EVERY || self.recent.len() < REBUILD_EVERY {
            self.rebuild();
        }
    }

    fn rebuild(&mut self) {
        self.since_rebuild = 0;
        self.sorted.clear();
        self.sorted.extend_from_slice(&self.recent);
        self.sorted.sort_unstable();
        self.sums[self.sorted.len()] = 0.0;
        self.squares[self.sorted.len()] = 0.0;
        for (i, &length) in self.sorted.iter().enumerate().rev() {
            let length = f64::from(length);
            self.sums[i] = self.sums[i + 1] + length;
            self.squares[i] = self.squares[i + 1] + length * length;
        }
    }

    /// Expected square of the tokens that a sequence still outputs, having output `age`, at most `most`.
    #[must_use]
    pub fn remaining_squared(&self, age: u32, most: u32) -> f64 {
        let first = self.sorted.partition_point(|&length| length <= age);
        let longer = (self.sorted.len() - first) as f64;
        let age = f64::from(age);
        // Sum of (length - age)^2 over the longer ones.
        let seen = self.squares[first] - 2.0 * age * self.sums[first] + age * age * longer;
        let prior = PRIOR_TOKENS.max(age);
        let expected = (seen + PRIOR_WEIGHT * prior * prior) / (longer + PRIOR_WEIGHT);
        expected.min(f64::from(most) * f64::from(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_is_the_mean_square_of_what_longer_outputs_had_left() {
        let mut lengths = OutputLengths::default();
        let samples: Vec<u32> = (0..3000).map(|i| (i * 7919) % 5000).collect();
        for &length in &samples {
            lengths.learn(length);
        }
        lengths.rebuild();
        for age in [0u32, 1, 500, 4999, 6000] {
            let longer = samples[1000..].iter().filter(|&&length| length > age);
            let squares: Vec<f64> = longer.map(|&length| f64::from(length - age).powi(2)).collect();
            let prior = 1000f64.max(f64::from(age)).powi(2);
            let expected = (squares.iter().sum::<f64>() + 4.0 * prior) / (squares.len() as f64 + 4.0);
            let got = lengths.remaining_squared(age, u32::MAX);
            assert!((got - expected).abs() <= 1e-6 * expected, "{age}: {got} {expected}");
            assert!(lengths.remaining_squared(age, 10) <= 100.0);
        }
    }

    #[test]
    fn nothing_known_is_cautious() {
        assert!(OutputLengths::default().remaining_squared(0, u32::MAX) >= 1e6);
    }
}
