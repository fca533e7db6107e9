//! How long outputs get: the hazard of ending at each age, learned from what ended lately and from what still
//! runs.
//!
//! Ages are grouped into bins, eight an octave. The rate of ending in a bin is `(ends + prior) / (tokens spent in
//! it + prior)`, over the last `WINDOW` outputs and, so that long ones count before they end, over the running
//! ones as far as they got. `drift` corrects the rates by what has been seen of late: ends that came, over ends
//! that were expected of the running sequences. A change of workload moves it long before the window has turned
//! over.
//!
//! What a tenant has shown itself (see `learned.rs`) is worked out in the same way. Its imaginary outputs end at
//! the rates that all tenants have shown together, so with few outputs of its own it is like all of them.

/// Finished outputs that are remembered.
const WINDOW: usize = 2000;
/// Imaginary outputs that pass through every bin: at the rate `1 / max(PRIOR_TOKENS, age)`, for a tenant at the
/// shared one.
const PRIOR_WEIGHT: f64 = 4.0;
const PRIOR_TOKENS: f64 = 1000.0;
/// Ends that the drift is averaged over, and imaginary ones that came as expected.
const DRIFT_ENDS: f64 = 96.0;
const DRIFT_PRIOR: f64 = 24.0;
/// Standard deviations by which rates are taken lower for what so few outputs can say.
const CAUTION: f64 = 1.5;
/// Bins an octave.
const SUB_BINS: u32 = 8;
/// Bins: ages up to 2^21.
const NUM_BINS: usize = 152;

/// Points in time, in tokens from now, at which memory is forecast.
pub(super) const NUM_HORIZONS: usize = 16;
/// Half an octave or so apart, from 16 to 16,384.
pub(in crate::scheduler) const HORIZONS: [f32; NUM_HORIZONS] = [
    16.0, 25.0, 40.0, 64.0, 102.0, 161.0, 256.0, 406.0, 645.0, 1024.0, 1625.0, 2580.0, 4096.0, 6502.0,
    10321.0, 16384.0,
];

/// Expected square of the tokens to come, by the trapezoidal rule: the integral of `2 t S(t)`.
fn expected_square(survival: &[f32; NUM_HORIZONS]) -> f32 {
    let (mut last, mut goes_on, mut sum) = (0.0, 1.0, 0.0);
    for (&horizon, &next) in HORIZONS.iter().zip(survival) {
        sum += (goes_on + next) * 0.5 * (horizon * horizon - last * last);
        (last, goes_on) = (horizon, next);
    }
    sum
}

/// The bin of an age.
fn bin_of(age: u32) -> usize {
    if age < SUB_BINS {
        return age as usize;
    }
    let octave = age.ilog2() - 3;
    ((octave * SUB_BINS + (age >> octave)) as usize).min(NUM_BINS - 1)
}

/// First age of a bin.
fn first_age(bin: usize) -> u32 {
    let bin = bin as u32;
    if bin < 2 * SUB_BINS {
        return bin;
    }
    let octave = bin / SUB_BINS - 1;
    (bin % SUB_BINS + SUB_BINS) << octave
}

/// Ages of a bin.
fn width(bin: usize) -> f64 {
    f64::from(first_age(bin + 1) - first_age(bin))
}

/// What is known about the lengths of outputs.
#[derive(Clone, Debug)]
pub(in crate::scheduler) struct OutputLengths {
    /// Ring of the bins in which the last outputs ended.
    recent: Vec<u8>,
    next: usize,
    /// By bin: outputs of the window that ended in it.
    ends: Vec<u32>,
    /// By bin: outputs that had got there at the last look, and had not ended.
    running: Vec<u32>,
    /// By bin: expected ends up to its first age.
    hazard: Vec<f64>,
    /// What multiplies the rates: drift, and caution.
    pace: f64,
    /// By bin of the present age: probability of going on for each horizon.
    survival: Vec<[f32; NUM_HORIZONS]>,
    /// By bin: expected square of the tokens to come.
    squares: Vec<f32>,
    seen_ends: f64,
    expected_ends: f64,
}

impl Default for OutputLengths {
    fn default() -> Self {
        let mut lengths = Self::empty();
        lengths.rebuild(None);
        lengths.tabulate();
        lengths
    }
}

impl OutputLengths {
    /// Of a tenant of which nothing is known: nothing is worked out yet.
    pub(super) fn empty() -> Self {
        Self {
            recent: Vec::with_capacity(WINDOW),
            next: 0,
            ends: vec![0; NUM_BINS],
            running: vec![0; NUM_BINS],
            hazard: vec![0.0; NUM_BINS + 1],
            pace: 1.0,
            survival: vec![[0.0; NUM_HORIZONS]; NUM_BINS],
            squares: vec![0.0; NUM_BINS],
            seen_ends: 0.0,
            expected_ends: 0.0,
        }
    }

    /// An output ended by itself. Its part of what was expected since the last [`OutputLengths::rebuild`] is
    /// counted there. Returns its place in the window.
    pub(super) fn learn(&mut self, length: u32) -> usize {
        let place = self.remember(bin_of(length) as u8);
        self.seen_ends += 1.0;
        place
    }

    fn remember(&mut self, bin: u8) -> usize {
        self.ends[usize::from(bin)] += 1;
        if self.recent.len() < WINDOW {
            self.recent.push(bin);
            return self.recent.len() - 1;
        }
        let place = self.next;
        let old = std::mem::replace(&mut self.recent[place], bin);
        self.ends[usize::from(old)] -= 1;
        self.next = (place + 1) % WINDOW;
        place
    }

    /// Takes over the outputs of a window that are `mine`, by their places there, and that part of its drift.
    pub(super) fn take_part(&mut self, window: &Self, mine: impl Fn(usize) -> bool) {
        let (newer, older) = window.recent.split_at(window.next);
        let places = (window.next..).zip(older).chain((0..).zip(newer));
        for (_, &bin) in places.filter(|&(place, _)| mine(place)) {
            self.remember(bin);
        }
        let part = self.recent.len() as f64 / window.recent.len().max(1) as f64;
        self.seen_ends = part * window.seen_ends;
        self.expected_ends = part * window.expected_ends;
    }

    /// Counts a sequence that got from one age to another: so many ends were expected of it.
    pub(super) fn expose(&mut self, from: u32, to: u32) {
        self.expected_ends += self.cumulative(to) - self.cumulative(from);
    }

    /// [`OutputLengths::expose`] of one that has not ended; the next [`OutputLengths::rebuild`] knows how far it
    /// got.
    pub(super) fn expose_running(&mut self, from: u32, to: u32) {
        self.expose(from, to);
        self.running[bin_of(to)] += 1;
    }

    /// Ends that came, over those that were expected, of late.
    fn drift(&self) -> f64 {
        (self.seen_ends + DRIFT_PRIOR) / (self.expected_ends + DRIFT_PRIOR)
    }

    /// Works the rates out again; for a tenant, of what all are like.
    pub(super) fn rebuild(&mut self, shared: Option<&Self>) {
        let mut beyond = 0.0;
        let mut rates = [0.0; NUM_BINS];
        for bin in (0..NUM_BINS).rev() {
            let (first, width) = (f64::from(first_age(bin)), width(bin));
            let (ends, censored) = (f64::from(self.ends[bin]), f64::from(self.running[bin]));
            let tokens = width * (beyond + 0.5 * (ends + censored));
            let prior = PRIOR_WEIGHT * width;
            let imagined = shared.map_or(prior / first.max(PRIOR_TOKENS), |shared| prior * shared.rate(bin));
            rates[bin] = (ends + imagined) / (tokens + prior);
            beyond += ends + censored;
        }
        self.running.fill(0);
        for (bin, rate) in rates.iter().enumerate() {
            self.hazard[bin + 1] = self.hazard[bin] + rate * width(bin);
        }
        let scale = (DRIFT_ENDS / self.expected_ends.max(DRIFT_ENDS)).min(1.0);
        self.seen_ends *= scale;
        self.expected_ends *= scale;
        // The imaginary outputs of a tenant tell of outputs that were seen.
        let outputs = self.recent.len() as f64 + if shared.is_some() { PRIOR_WEIGHT } else { 0.0 };
        let caution = CAUTION / (outputs + 1.6 * CAUTION * CAUTION).sqrt();
        self.pace = self.drift() * (1.0 - caution);
    }

    /// Fills the tables by the rates as they are.
    pub(super) fn tabulate(&mut self) {
        for bin in 0..NUM_BINS {
            let age = first_age(bin) + (width(bin) / 2.0) as u32;
            let now = self.cumulative(age);
            for (k, horizon) in HORIZONS.iter().enumerate() {
                let more = self.cumulative(age.saturating_add(*horizon as u32)) - now;
                self.survival[bin][k] = (-self.pace * more).exp() as f32;
            }
            self.squares[bin] = expected_square(&self.survival[bin]);
        }
    }

    /// Ends a token in a bin, as the window has them.
    fn rate(&self, bin: usize) -> f64 {
        (self.hazard[bin + 1] - self.hazard[bin]) / width(bin)
    }

    /// Expected ends of one output up to an age, as the window has it.
    fn cumulative(&self, age: u32) -> f64 {
        let bin = bin_of(age);
        let share = f64::from(age - first_age(bin)) / width(bin);
        self.hazard[bin] + share * (self.hazard[bin + 1] - self.hazard[bin])
    }

    /// Expected square of the tokens to come.
    pub(super) fn squares(&self, age: u32) -> f32 {
        self.squares[bin_of(age)]
    }

    /// Probabilities that an output of this age goes on for each of [`HORIZONS`].
    pub(in crate::scheduler) fn survival(&self, age: u32) -> &[f32; NUM_HORIZONS] {
        &self.survival[bin_of(age)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Exponential lengths by a fixed sequence.
    fn exponential(count: usize, mean: f64) -> impl Iterator<Item = u32> {
        (0..count).map(move |i| {
            let uniform = ((i * 7919) % count) as f64 / count as f64 + 0.5 / count as f64;
            (-uniform.ln() * mean) as u32 + 1
        })
    }

    fn work_out(lengths: &mut OutputLengths, shared: Option<&OutputLengths>) {
        lengths.rebuild(shared);
        lengths.tabulate();
    }

    #[test]
    fn bins_cover_every_age_once() {
        for age in 0..100_000 {
            let bin = bin_of(age);
            assert!(first_age(bin) <= age && age < first_age(bin + 1), "{age} in bin {bin}");
        }
    }

    #[test]
    fn the_chance_to_go_on_is_that_of_the_outputs_seen() {
        let mut lengths = OutputLengths::default();
        exponential(2000, 800.0).for_each(|length| {
            lengths.learn(length);
        });
        // As many ends as expected: no drift.
        lengths.expected_ends = lengths.seen_ends;
        work_out(&mut lengths, None);
        for age in [0, 100, 1000] {
            for (k, horizon) in HORIZONS.iter().enumerate().take(11) {
                let expected = (-horizon / 800.0).exp();
                assert!((lengths.survival(age)[k] - expected).abs() < 0.06, "{age} {horizon}");
            }
        }
        let square = lengths.squares(0);
        assert!((0.8..1.6).contains(&(square / (2.0 * 800.0 * 800.0))), "{square}");
    }

    #[test]
    fn ends_that_do_not_come_are_seen_long_before_the_window_turns_over() {
        let mut lengths = OutputLengths::default();
        exponential(2000, 100.0).for_each(|length| {
            lengths.learn(length);
        });
        lengths.expected_ends = lengths.seen_ends;
        work_out(&mut lengths, None);
        let before = lengths.survival(0)[7];
        for _ in 0..40 {
            lengths.expose_running(0, 400);
        }
        work_out(&mut lengths, None);
        assert!(lengths.drift() < 0.6, "{}", lengths.drift());
        assert!(lengths.survival(0)[7] > 3.0 * before);
    }

    #[test]
    fn nothing_known_is_cautious() {
        assert!(OutputLengths::default().survival(0)[9] > 0.7);
    }
}
