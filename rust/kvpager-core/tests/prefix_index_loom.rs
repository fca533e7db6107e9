//! Every interleaving of small models of the index under `clock`, whose pins and releases count in the nodes without a
//! lock of their own. `make test-loom`.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "tests")]

mod explore;

use explore::explore_up_to;
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, Pin, PrefixIndex, ShareScope};
use kvpager_core::{Error, NamespaceId, Result};
use std::sync::Arc;

/// Changes of thread at points where a thread could have gone on. One pin makes some twenty exchanges.
const PREEMPTIONS: usize = 2;

#[derive(Clone)]
struct World {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    namespace: NamespaceId,
}

/// Blocks of one token.
fn world(num_blocks: u32) -> World {
    let pool = BlockPool::new(PoolConfig { num_blocks, max_accounts: 1, max_open_steps: 1 }).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    let config = IndexConfig { block_size: 1, eviction: EvictionPolicy::Clock };
    // A keyed hash would place the nodes otherwise in each run, and loom repeats runs.
    let index = PrefixIndex::with_constant_hash(pool.clone(), config).unwrap();
    let scope = ShareScope::Private("alice".into());
    let namespace = index.namespace(&scope, &Fingerprint::default(), account).unwrap();
    World { pool, index, namespace }
}

impl World {
    fn insert(&self, path: &[u32]) -> Result<Pin> {
        self.index.insert_prefix(self.namespace, path, &mut Vec::new()).map(|(pin, _)| pin)
    }

    fn pin(&self, path: &[u32]) -> Result<Pin> {
        self.index.match_whole(self.namespace, path, &mut Vec::new())
    }

    /// Pins a path; what it found stays there for as long as it is pinned.
    fn pin_and_look(&self, path: &[u32]) -> Result<usize> {
        let mut blocks = Vec::new();
        let pin = self.index.match_whole(self.namespace, path, &mut blocks)?;
        assert_eq!(pin.num_blocks(), blocks.len());
        let mut again = Vec::new();
        let other = self.index.match_whole(self.namespace, &path[..blocks.len()], &mut again)?;
        assert_eq!((other.num_blocks(), &again), (blocks.len(), &blocks), "a pinned block was evicted");
        Ok(blocks.len())
    }

    /// Nothing is held, every block is somewhere, and all that is cached can go.
    fn check_idle(&self) {
        self.index.check_invariants().unwrap();
        self.pool.check_invariants().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.held, stats.free + stats.cached), (0, stats.capacity), "{stats:?}");
        assert_eq!(u64::from(self.index.evict(u32::MAX)), stats.cached);
        assert_eq!(self.pool.stats().free, stats.capacity);
    }
}

/// Runs two threads of a world, and checks what they leave.
fn beside<T: 'static>(
    world: &World,
    other: impl FnOnce(&World) -> T + 'static,
    own: impl FnOnce(&World),
) -> T {
    let thread = {
        let world = world.clone();
        loom::thread::spawn(move || other(&world))
    };
    own(world);
    thread.join().unwrap()
}

fn is_short(error: &Error) -> bool {
    matches!(error, Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. })
}

fn a_pin_beside_an_eviction() {
    let world = world(4);
    drop(world.insert(&[1, 2]).unwrap());
    let mut found = 0;
    let evicted =
        beside(&world, |world| world.index.evict(2), |world| found = world.pin_and_look(&[1, 2]).unwrap());
    assert!(found as u32 + evicted >= 2, "{found} found, {evicted} evicted");
    world.check_idle();
}

fn a_release_beside_an_eviction() {
    let world = world(4);
    let pin = world.insert(&[1, 2]).unwrap();
    beside(&world, |world| drop(world.index.evict(2)), |_| drop(pin));
    world.check_idle();
}

fn two_last_releases_below_one_head() {
    let world = world(4);
    let (left, right) = (world.insert(&[1, 2]).unwrap(), world.insert(&[1, 3]).unwrap());
    beside(&world, move |_| drop(left), |_| drop(right));
    world.check_idle();
}

fn two_first_pins_of_one_path() {
    // Both may hold its capacity for a moment, of which there is enough for one only.
    let world = world(2);
    drop(world.insert(&[1, 2]).unwrap());
    let try_pin = |world: &World| match world.pin(&[1, 2]) {
        Ok(pin) => pin.num_blocks() == 2,
        Err(error) => {
            assert!(is_short(&error), "{error}");
            false
        }
    };
    let mut mine = false;
    let others = beside(&world, try_pin, |world| mine = try_pin(world));
    assert!(mine || others, "one of the two at least is served");
    world.check_idle();
}

fn a_first_pin_beside_a_last_release() {
    let world = world(4);
    let pin = world.insert(&[1, 2]).unwrap();
    beside(&world, move |_| drop(pin), |world| assert_eq!(world.pin_and_look(&[1, 2]).unwrap(), 2));
    world.check_idle();
}

fn a_pin_beside_a_split() {
    let world = world(4);
    drop(world.insert(&[1, 2, 3]).unwrap());
    beside(
        &world,
        |world| assert_eq!(world.pin(&[1]).unwrap().num_blocks(), 1),
        |world| assert_eq!(world.pin_and_look(&[1, 2, 3]).unwrap(), 3),
    );
    world.check_idle();
}

fn a_pin_beside_a_merge() {
    let world = world(4);
    drop(world.insert(&[1, 2]).unwrap());
    // Splits, and leaves a seam that the next writer merges.
    drop(world.pin(&[1]).unwrap());
    beside(
        &world,
        |world| drop(world.insert(&[9]).unwrap()),
        |world| assert_eq!(world.pin_and_look(&[1, 2]).unwrap(), 2),
    );
    world.check_idle();
}

macro_rules! models {
    ($($name:ident),* $(,)?) => {
        mod models {
            $(#[test] fn $name() { super::explore_up_to(super::PREEMPTIONS, super::$name) })*
        }
    };
}

models!(
    a_pin_beside_an_eviction,
    a_release_beside_an_eviction,
    two_last_releases_below_one_head,
    two_first_pins_of_one_path,
    a_first_pin_beside_a_last_release,
    a_pin_beside_a_split,
    a_pin_beside_a_merge,
);
