//! Real workloads through the real scheduler, index and pool, in virtual time.
//!
//! There is no model: an output token is counted, not computed, and a step takes as long as [`StepTime`] says.
//! Everything else is what a server runs. [`Replay`] takes columns of requests as they stream in and does a
//! bounded number of steps a call, so that its caller can show progress and stop. [`SequentialReplay`] asks the
//! index and pool alone, one request at a time, for figures that other caches can be compared with block for
//! block. [`Oracle`] is the schedule of somebody who knows every output length. No I/O here.
//! See `docs/notes/replay.md`.

mod active;
mod arrivals;
mod burst;
mod columns;
mod config;
mod driver;
mod fairness;
mod measure;
mod oracle;
mod report;
mod sequential;
mod step_time;
mod tokens;
mod waiting;

pub use columns::Columns;
pub use config::{Arrivals, ReplayConfig};
pub use driver::{Progress, Replay};
pub use oracle::{Oracle, OracleOutcome};
pub use sequential::{SequentialCounts, SequentialReplay};
pub use step_time::StepTime;
