//! Where a step's time goes, recorded when asked for.
//!
//! Off, a phase costs one test of a pointer. On, it costs one reading of the processor's counter. Built with
//! `--cfg unrecorded`, it costs nothing, which is what `benches/python/scheduler_profile.py` compares with.

use crate::memory::{Asked, bytes_of};
use crate::ticks::TickClock;
use crate::{Error, Result};
use hdrhistogram::Histogram;

/// A part of a step. Their times do not overlap; together they are the time inside `step` and `commit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Taking in submits and aborts, removing what ended.
    Inbox,
    /// Decodes and prefill chunks of what runs: their blocks, and preemption where there are none.
    Growth,
    /// Matching and pinning prefixes of requests that may be admitted.
    LookUp,
    /// Choosing and reserving for the next requests, their first chunk included, look-ups not.
    Admission,
    /// Opening the step and writing its arrays.
    BatchArrays,
    /// Taking the sampled tokens, indexing full blocks, ending sequences.
    Commit,
}

impl Phase {
    /// All of them, in the order of a step.
    pub const ALL: [Self; 6] =
        [Self::Inbox, Self::Growth, Self::LookUp, Self::Admission, Self::BatchArrays, Self::Commit];

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inbox => "inbox",
            Self::Growth => "growth",
            Self::LookUp => "look_up",
            Self::Admission => "admission",
            Self::BatchArrays => "batch_arrays",
            Self::Commit => "commit",
        }
    }
}

/// One phase of one step on the clock.
#[derive(Clone, Copy, Debug)]
pub struct PhaseSpan {
    /// Number of the step.
    pub step_id: u64,
    /// What was done.
    pub phase: Phase,
    /// Nanoseconds since recording began.
    pub start_ns: u64,
    /// Nanoseconds that it took.
    pub duration_ns: u64,
}

/// What was recorded.
#[derive(Clone, Debug)]
pub struct PhaseTimes {
    /// Nanoseconds a step, by [`Phase`].
    pub phases: [Histogram<u64>; Phase::ALL.len()],
    /// Nanoseconds a step, all phases together.
    pub steps: Histogram<u64>,
    /// The first spans, as many as were asked for.
    pub spans: Vec<PhaseSpan>,
    /// Spans for which there was no room.
    pub dropped_spans: u64,
}

/// Times longer than this many nanoseconds are recorded as this.
const LONGEST_NS: u64 = 60_000_000_000;

impl PhaseTimes {
    fn new(max_spans: usize) -> Result<Self> {
        let empty = Histogram::new_with_bounds(1, LONGEST_NS, 3).map_err(|error| {
            Error::invalid(format!("a histogram up to {LONGEST_NS} ns cannot be made: {error}"))
        })?;
        let what = format_args!("a recording of max_spans {max_spans}");
        let spans = Asked::new(what, bytes_of::<PhaseSpan>(max_spans))?.room(max_spans)?;
        Ok(Self { phases: std::array::from_fn(|_| empty.clone()), steps: empty, spans, dropped_spans: 0 })
    }
}

/// The recorder of one scheduler; empty unless recording is on.
#[derive(Default)]
pub(super) struct Phases(Option<Box<Recorder>>);

struct Recorder {
    clock: TickClock,
    began: u64,
    /// When the phase at hand began.
    last: u64,
    /// Ticks of each phase in the step at hand.
    current: [u64; Phase::ALL.len()],
    /// Steps that did not have the phase; they go to the histogram at the end.
    num_without: [u64; Phase::ALL.len()],
    step_id: u64,
    times: PhaseTimes,
}

impl Phases {
    /// Begins to record, with room for `max_spans` single spans. What was recorded before is forgotten.
    pub(super) fn begin(&mut self, max_spans: usize) -> Result<()> {
        let clock = TickClock::new();
        let now = clock.now();
        self.0 = Some(Box::new(Recorder {
            clock,
            began: now,
            last: now,
            current: [0; Phase::ALL.len()],
            num_without: [0; Phase::ALL.len()],
            step_id: 0,
            times: PhaseTimes::new(max_spans)?,
        }));
        Ok(())
    }

    /// Ends the recording and hands it over.
    pub(super) fn end(&mut self) -> Option<PhaseTimes> {
        self.0.take().map(|mut recorder| {
            for (histogram, count) in recorder.times.phases.iter_mut().zip(recorder.num_without) {
                histogram.saturating_record_n(0, count);
            }
            recorder.times
        })
    }

    /// The first phase of a call begins now.
    #[inline]
    pub(super) fn start(&mut self) {
        if let Some(recorder) = self.recorder() {
            recorder.start();
        }
    }

    /// Ends `phase`, which began where the last one ended; the next one begins now.
    #[inline]
    pub(super) fn lap(&mut self, phase: Phase) {
        if let Some(recorder) = self.recorder() {
            recorder.lap(phase);
        }
    }

    /// Names the step that the phases up to [`Phases::end_step`] are of.
    #[inline]
    pub(super) fn name_step(&mut self, step_id: u64) {
        if let Some(recorder) = self.recorder() {
            recorder.step_id = step_id;
        }
    }

    /// Closes the account of a step.
    #[inline]
    pub(super) fn end_step(&mut self) {
        if let Some(recorder) = self.recorder() {
            recorder.end_step();
        }
    }

    #[inline]
    fn recorder(&mut self) -> Option<&mut Recorder> {
        if cfg!(unrecorded) { None } else { self.0.as_deref_mut() }
    }
}

impl Recorder {
    #[cold]
    #[inline(never)]
    fn start(&mut self) {
        self.last = self.clock.now();
    }

    // Out of line and cold: what stays in the step is the test of a pointer, and its loops are compiled as if it was all.
    #[cold]
    #[inline(never)]
    fn lap(&mut self, phase: Phase) {
        let since = std::mem::replace(&mut self.last, self.clock.now());
        let ticks = self.last.saturating_sub(since);
        self.current[phase as usize] += ticks;
        if self.times.spans.len() < self.times.spans.capacity() {
            let start_ns = self.clock.nanoseconds(since.saturating_sub(self.began));
            let duration_ns = self.clock.nanoseconds(ticks);
            self.times.spans.push(PhaseSpan { step_id: self.step_id, phase, start_ns, duration_ns });
        } else {
            self.times.dropped_spans += 1;
        }
    }

    #[cold]
    #[inline(never)]
    fn end_step(&mut self) {
        let mut total = 0;
        for (phase, ticks) in self.current.iter_mut().enumerate() {
            if *ticks == 0 {
                self.num_without[phase] += 1;
                continue;
            }
            let duration_ns = self.clock.nanoseconds(std::mem::take(ticks));
            self.times.phases[phase].saturating_record(duration_ns);
            total += duration_ns;
        }
        self.times.steps.saturating_record(total);
    }
}
