//! What a run found and how long its calls took.

use super::operation::FAMILIES;
use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

/// Something that must not be.
#[derive(Clone, Debug)]
pub(super) struct Violation {
    pub(super) text: String,
    /// The worker that saw it, and at which of its operations; `None` for a check while all stood still.
    pub(super) seen_by: Option<(usize, usize)>,
}

impl Violation {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), seen_by: None }
    }
}

/// Latencies by family of operations, in nanoseconds to two figures. Nothing is allocated once it is made.
#[derive(Debug)]
pub struct Latencies(Vec<Histogram<u32>>);

/// Longest latency that is told apart, in nanoseconds.
const LONGEST: u64 = 100_000_000_000;

impl Default for Latencies {
    /// Nothing recorded.
    fn default() -> Self {
        #[expect(clippy::expect_used, reason = "bounds and figures are constants in the accepted range")]
        let histogram =
            || Histogram::new_with_bounds(1, LONGEST, 2).expect("two figures up to 100 s are accepted");
        Self(FAMILIES.iter().map(|_| histogram()).collect())
    }
}

impl Latencies {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn record(&mut self, family: usize, nanoseconds: u64) {
        self.0[family].saturating_record(nanoseconds.max(1));
    }

    /// Records a latency of a family by its name. Returns whether there is such a family.
    pub fn record_named(&mut self, family: &str, nanoseconds: u64) -> bool {
        let found = FAMILIES.iter().position(|name| *name == family);
        found.inspect(|family| self.record(*family, nanoseconds)).is_some()
    }

    /// Adds what another has recorded.
    pub fn add(&mut self, other: &Self) {
        for (sum, part) in self.0.iter_mut().zip(&other.0) {
            // Both have the same bounds, so nothing of the other is outside.
            let _ = sum.add(part);
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(Histogram::reset);
    }

    /// Count, percentiles and maximum over all operations, and by family.
    #[must_use]
    pub fn to_json(&self) -> (Value, Value) {
        let mut all = Self::new().0.swap_remove(0);
        let mut by_family = Map::new();
        for (name, histogram) in FAMILIES.iter().zip(&self.0) {
            let _ = all.add(histogram);
            if !histogram.is_empty() {
                by_family.insert((*name).to_owned(), quantiles(histogram));
            }
        }
        (quantiles(&all), Value::Object(by_family))
    }
}

fn quantiles(histogram: &Histogram<u32>) -> Value {
    let at = |share: f64| histogram.value_at_quantile(share).min(histogram.max());
    json!({
        "count": histogram.len(),
        "p50": at(0.5),
        "p99": at(0.99),
        "p999": at(0.999),
        "max": histogram.max(),
    })
}
