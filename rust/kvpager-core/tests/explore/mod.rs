//! How models are run under loom.

#![expect(unreachable_pub, reason = "a module of each test binary")]

use kvpager_core::sync::interleave_loads;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs a model twice: in every order of its exchanges, with up to so many preemptions, and in the orders of loads
/// that loom passes over otherwise (see `kvpager_core::sync`), with up to [`MOST`].
pub fn explore_up_to(preemptions: usize, model: impl Fn() + Sync + Send + Clone + 'static) {
    for loads in [false, true] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = (loads || preemptions < EVERY).then_some(preemptions.min(MOST));
        builder.max_branches = 20_000;
        let executions = Arc::new(AtomicUsize::new(0));
        let (counter, model) = (Arc::clone(&executions), model.clone());
        interleave_loads(loads);
        builder.check(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            model();
        });
        let executions = executions.load(Ordering::Relaxed);
        println!("{executions} executions{}", if loads { ", loads interleaved" } else { "" });
        assert!(!loads || executions > 10, "only {executions} executions: the model hardly interleaves");
    }
}

/// No bound on preemptions.
pub const EVERY: usize = usize::MAX;
/// The bound where loads are points of preemption: there are many more of them.
const MOST: usize = 3;
