//! The block pool against its promises, a naive model, and planted faults.

#![expect(clippy::unwrap_used, reason = "tests")]

mod allocations;
mod model;
mod mutants;
mod promises;
mod support;
