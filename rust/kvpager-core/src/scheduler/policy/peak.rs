//! The memory that a batch will need: mean and spread at each horizon, and the peak of both.

use super::survival::{HORIZONS, NUM_HORIZONS, OutputLengths};

/// Blocks that a set of sequences will hold, over those that they hold now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trajectory {
    mean: [f32; NUM_HORIZONS],
    variance: [f32; NUM_HORIZONS],
    held: f32,
    /// Sum of the expected squares of what each takes more.
    squares: f32,
}

impl Trajectory {
    /// Adds a sequence that holds `held` blocks, has output `age` tokens and may output `most` more.
    pub(in crate::scheduler) fn add(
        &mut self,
        lengths: &OutputLengths,
        held: f32,
        age: u32,
        most: u32,
        block_size: f32,
    ) {
        let survival = lengths.survival(age);
        let most = most as f32;
        for k in 0..NUM_HORIZONS {
            let goes_on = if HORIZONS[k] < most { survival[k] } else { 0.0 };
            let blocks = held + HORIZONS[k] / block_size;
            self.mean[k] += blocks * goes_on;
            self.variance[k] += blocks * blocks * goes_on * (1.0 - goes_on);
        }
        self.held += held;
        self.squares += lengths.squares(age).min(most * most) / (block_size * block_size);
    }

    /// [`Trajectory::add`] over layer groups, of which each grows for so many `rooms` tokens at most: what leaves a
    /// window makes room for what enters it.
    pub(in crate::scheduler) fn add_groups(
        &mut self,
        lengths: &OutputLengths,
        held: f32,
        age: u32,
        most: u32,
        block_size: f32,
        rooms: &[f32],
    ) {
        let survival = lengths.survival(age);
        let most = most as f32;
        let grown = |tokens: f32| rooms.iter().map(|room| tokens.min(*room)).sum::<f32>() / block_size;
        for k in 0..NUM_HORIZONS {
            let goes_on = if HORIZONS[k] < most { survival[k] } else { 0.0 };
            let blocks = held + grown(HORIZONS[k]);
            self.mean[k] += blocks * goes_on;
            self.variance[k] += blocks * blocks * goes_on * (1.0 - goes_on);
        }
        self.held += held;
        self.squares += grown(lengths.squares(age).min(most * most).sqrt()).powi(2);
    }

    /// Adds blocks that sequences of (age, most tokens to come) share: they are there until the last of those has ended.
    pub(in crate::scheduler) fn add_shared(
        &mut self,
        lengths: &OutputLengths,
        blocks: f32,
        users: impl Iterator<Item = (u32, u32)> + Clone,
    ) {
        for (k, &horizon) in HORIZONS.iter().enumerate() {
            let has_ended = |(age, most): (u32, u32)| {
                if horizon < most as f32 { 1.0 - lengths.survival(age)[k] } else { 1.0 }
            };
            let all_ended: f32 = users.clone().map(has_ended).product();
            self.mean[k] += blocks * (1.0 - all_ended);
            self.variance[k] += blocks * blocks * all_ended * (1.0 - all_ended);
        }
        self.held += blocks;
    }

    /// Blocks at each horizon, in the mean, and now.
    #[cfg(test)]
    pub(in crate::scheduler) const fn blocks(&self) -> ([f32; NUM_HORIZONS], f32) {
        (self.mean, self.held)
    }

    /// Most blocks that the set takes beyond those of now, at so many standard deviations above the mean; at least
    /// 0.
    #[must_use]
    pub fn peak_growth(&self, deviations: f32) -> f32 {
        let at = |k: usize| self.mean[k] + deviations * self.variance[k].sqrt() - self.held;
        (0..NUM_HORIZONS).map(at).fold(0.0, f32::max)
    }

    /// Root of the summed expected squares of what each takes more.
    #[must_use]
    pub fn spread(&self) -> f32 {
        self.squares.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_surely_goes_on_grows_and_what_may_not_does_not() {
        let lengths = OutputLengths::default();
        let mut sure = Trajectory::default();
        // 100 tokens at most: beyond that horizon it has ended.
        sure.add(&lengths, 10.0, 0, 100, 16.0);
        let growth = sure.peak_growth(0.0);
        assert!((0.0..=100.0 / 16.0).contains(&growth), "{growth}");
        assert_eq!(Trajectory::default().peak_growth(3.0), 0.0);
    }

    #[test]
    fn a_full_window_grows_no_more() {
        let lengths = OutputLengths::default();
        let of = |rooms: &[f32]| {
            let mut growth = Trajectory::default();
            growth.add_groups(&lengths, 10.0, 0, 10_000, 16.0, rooms);
            (growth.peak_growth(1.0), growth.spread())
        };
        let mut plain = Trajectory::default();
        plain.add(&lengths, 10.0, 0, 10_000, 16.0);
        assert_eq!(of(&[f32::INFINITY]), (plain.peak_growth(1.0), plain.spread()));
        assert_eq!(of(&[f32::INFINITY, 0.0]), of(&[f32::INFINITY]));
        assert_eq!(of(&[0.0, 0.0]).1, 0.0);
        assert!(of(&[f32::INFINITY, 64.0]) > of(&[f32::INFINITY]));
        assert!(of(&[f32::INFINITY, 64.0]).1 <= of(&[f32::INFINITY]).1 + 4.0);
    }

    #[test]
    fn the_margin_of_many_is_less_than_the_sum_of_margins() {
        let lengths = OutputLengths::default();
        let (mut one, mut hundred) = (Trajectory::default(), Trajectory::default());
        one.add(&lengths, 50.0, 500, 16384, 16.0);
        (0..100).for_each(|_| hundred.add(&lengths, 50.0, 500, 16384, 16.0));
        assert!(hundred.spread() < 11.0 * one.spread());
        assert!(hundred.peak_growth(1.0) < 100.0 * one.peak_growth(1.0));
    }
}
