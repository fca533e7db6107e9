//! A snapshot is of one moment, whatever the engine's thread does meanwhile.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use support::{Engine, config, prompt};

#[test]
fn a_snapshot_adds_up_while_the_engine_steps() {
    for reuse in [true, false] {
        let mut engine = Engine::new(64, config(4), reuse);
        let tenants: Vec<_> = ["a", "b", "c"].iter().map(|name| engine.tenant(name)).collect();
        let (is_over, exact) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (scheduler, over, seen) =
            (Arc::clone(&engine.scheduler), Arc::clone(&is_over), Arc::clone(&exact));
        let reader = thread::spawn(move || {
            let mut last = 0;
            while !over.load(Ordering::Relaxed) {
                let snapshot = scheduler.snapshot().unwrap();
                if !snapshot.is_exact {
                    continue;
                }
                seen.fetch_add(1, Ordering::Relaxed);
                let pool = snapshot.pool;
                assert_eq!(pool.held + pool.cached + pool.free + pool.quarantined, pool.capacity, "{pool:?}");
                let committed: u64 = snapshot.tenants.iter().map(|(_, account)| account.committed).sum();
                assert_eq!(committed, pool.held + pool.reserved + pool.quarantined, "{snapshot:?}");
                let reserved: u64 = snapshot.tenants.iter().map(|(_, account)| account.reserved).sum();
                assert_eq!(reserved, pool.reserved, "{snapshot:?}");
                assert!(snapshot.scheduler.steps >= last, "steps only grow");
                last = snapshot.scheduler.steps;
            }
        });
        let start = Instant::now();
        let has_seen = || exact.load(Ordering::Relaxed) > 10;
        // Longer where the reader gets no processor meanwhile, and as long as it has not failed.
        for round in 0.. {
            if round >= 100 && (has_seen() || reader.is_finished() || start.elapsed().as_secs() > 60) {
                break;
            }
            for tenant in &tenants {
                engine.submit(tenant, &prompt(round % 7, 9 + round % 5), 6).unwrap();
            }
            for _ in 0..8 {
                engine.turn();
                if round < 100 { thread::yield_now() } else { thread::sleep(Duration::from_millis(1)) }
            }
        }
        engine.finish(20_000);
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        assert!(has_seen());
        let snapshot = engine.scheduler.snapshot().unwrap();
        assert!(snapshot.is_exact, "nobody is in the scheduler");
        assert_eq!(snapshot.pool, engine.pool.stats());
        assert_eq!(snapshot.scheduler, engine.scheduler.stats());
        assert_eq!(
            snapshot.tenants.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["a", "b", "c"]
        );
    }
}
