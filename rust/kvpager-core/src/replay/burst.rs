//! The busiest moment of a run, and how its requests fared.
//!
//! Arrivals are counted in windows of ten seconds. Only the window being filled and the busiest so far keep the
//! latencies of their requests, so that a trace of any length needs the memory of two.

use super::active::Active;
use super::measure::{Latencies, round};
use crate::scheduler::FinishedRequest;
use serde_json::{Value, json};

/// Seconds of a window.
const WINDOW: f64 = 10.0;

/// One window's requests.
struct Window {
    number: u64,
    arrivals: u64,
    refused: u64,
    finished: u64,
    ended_otherwise: u64,
    preempted: u64,
    lost_tokens: u64,
    /// Most blocks held when one of its requests ended.
    peak_held: u64,
    latencies: Latencies,
}

impl Window {
    fn new(number: u64) -> Self {
        Self {
            number,
            arrivals: 0,
            refused: 0,
            finished: 0,
            ended_otherwise: 0,
            preempted: 0,
            lost_tokens: 0,
            peak_held: 0,
            latencies: Latencies::new(),
        }
    }
}

/// Windows of a run.
pub(super) struct Bursts {
    current: Option<Window>,
    busiest: Option<Window>,
    first: u64,
    arrivals: u64,
    /// Sum of the squares of the counts of windows before the current one.
    squares: f64,
}

/// The window of a time.
fn window_of(time: f64) -> u64 {
    (time / WINDOW) as u64
}

impl Bursts {
    pub(super) fn new() -> Self {
        Self { current: None, busiest: None, first: 0, arrivals: 0, squares: 0.0 }
    }

    /// Counts an arrival. Arrivals come in order; a session's turn arrives when its time has come.
    pub(super) fn arrive(&mut self, time: f64) {
        let number = window_of(time);
        if self.current.as_ref().is_none_or(|current| current.number < number) {
            self.turn_over(number);
        }
        self.arrivals += 1;
        if let Some(current) = &mut self.current {
            current.arrivals += 1;
        }
    }

    fn turn_over(&mut self, number: u64) {
        match self.current.replace(Window::new(number)) {
            None => self.first = number,
            Some(full) => {
                self.squares += (full.arrivals as f64).powi(2);
                if self.busiest.as_ref().is_none_or(|busiest| busiest.arrivals < full.arrivals) {
                    self.busiest = Some(full);
                }
            }
        }
    }

    fn window(&mut self, arrival: f64) -> Option<&mut Window> {
        let number = window_of(arrival);
        let windows = [self.current.as_mut(), self.busiest.as_mut()];
        windows.into_iter().flatten().find(|window| window.number == number)
    }

    /// Counts a refusal of a request that arrived at `arrival`.
    pub(super) fn refuse(&mut self, arrival: f64) {
        if let Some(window) = self.window(arrival) {
            window.refused += 1;
        }
    }

    /// Counts a request that ended while `held` blocks were held; `lost` tokens were computed for nothing.
    pub(super) fn end(
        &mut self,
        ended: &FinishedRequest,
        request: &Active,
        as_wanted: bool,
        lost: u64,
        held: u64,
    ) {
        if let Some(window) = self.window(request.arrival) {
            window.peak_held = window.peak_held.max(held);
            window.lost_tokens += lost;
            window.preempted += u64::from(ended.preemptions > 0);
            if as_wanted {
                window.finished += 1;
                window.latencies.record(request);
            } else {
                window.ended_otherwise += 1;
            }
        }
    }

    /// The busiest window beside the mean one; null if all requests came in one.
    pub(super) fn report(&self) -> Value {
        let Some(current) = &self.current else { return Value::Null };
        if current.number == self.first {
            return Value::Null;
        }
        let busiest = self.busiest.as_ref().filter(|busiest| busiest.arrivals >= current.arrivals);
        let busiest = busiest.unwrap_or(current);
        let windows = (current.number - self.first + 1) as f64;
        let mean = self.arrivals as f64 / windows;
        let squares = self.squares + (current.arrivals as f64).powi(2);
        json!({
            "window": WINDOW,
            "from": busiest.number as f64 * WINDOW,
            "arrivals": busiest.arrivals,
            "mean_arrivals": round(mean),
            "times_mean": round(busiest.arrivals as f64 / mean),
            "index_of_dispersion": round((squares / windows - mean * mean) / mean),
            "finished": busiest.finished,
            "refused": busiest.refused,
            "ended_otherwise": busiest.ended_otherwise,
            "preempted_requests": busiest.preempted,
            "lost_tokens": busiest.lost_tokens,
            "peak_held": busiest.peak_held,
            "latency": busiest.latencies.report(),
        })
    }
}
