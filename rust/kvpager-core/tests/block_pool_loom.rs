//! Every interleaving, and every reordering that the orderings allow, of small models of the pool.
//! `make test-loom`.

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "tests")]

mod explore;

use explore::{EVERY, explore_up_to};
use kvpager_core::block_pool::{BlockPool, Magazine, PoolConfig, Quota, faults};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error};
use loom::cell::UnsafeCell;
use std::sync::Arc;

type Pool<const F: u8> = Arc<BlockPool<F>>;

/// What a block's owner writes without any synchronisation: a missing edge is an error of the model.
struct Payload(Vec<UnsafeCell<u32>>);

// SAFETY: the cells are loom's, which reports every access that is not ordered.
unsafe impl Sync for Payload {}
// SAFETY: as above.
unsafe impl Send for Payload {}

impl Payload {
    fn new(num_blocks: usize) -> Arc<Self> {
        Arc::new(Self((0..num_blocks).map(|_| UnsafeCell::new(0)).collect()))
    }

    fn write(&self, block: BlockHandle) {
        // SAFETY: only the block's owner writes, which is what the model checks.
        self.0[block.id().0 as usize].with_mut(|value| unsafe { *value += 1 });
    }
}

fn pool<const F: u8>(num_blocks: u32) -> (Pool<F>, AccountId) {
    pool_with_steps(num_blocks, 2)
}

fn pool_with_steps<const F: u8>(num_blocks: u32, max_open_steps: u32) -> (Pool<F>, AccountId) {
    let config = PoolConfig { num_blocks, max_accounts: 2, max_open_steps };
    let pool = BlockPool::<F>::with_fault(config).unwrap();
    let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).unwrap();
    (pool, account)
}

fn take<const F: u8>(
    pool: &BlockPool<F>,
    account: AccountId,
    count: usize,
) -> Result<Vec<BlockHandle>, Error> {
    let mut out = vec![BlockHandle::new(0, BlockId(0)); count];
    pool.allocate(account, &mut out)?;
    Ok(out)
}

fn assert_all_free<const F: u8>(pool: &BlockPool<F>) {
    pool.check_invariants().unwrap();
    assert_eq!(pool.stats().free, pool.stats().capacity);
}

fn allocate_against_allocate<const F: u8>() {
    let (pool, account) = pool::<F>(3);
    let payload = Payload::new(3);
    let other = {
        let (pool, payload) = (Arc::clone(&pool), Arc::clone(&payload));
        loom::thread::spawn(move || {
            let taken = take(&pool, account, 2);
            taken.iter().flatten().for_each(|block| payload.write(*block));
            taken.map(|blocks| pool.release(&blocks).unwrap()).is_ok()
        })
    };
    let taken = take(&pool, account, 2);
    taken.iter().flatten().for_each(|block| payload.write(*block));
    let mine = taken.map(|blocks| pool.release(&blocks).unwrap()).is_ok();
    assert!(other.join().unwrap() || mine, "of two that each fit alone, one at least is served");
    assert_all_free(&pool);
}

fn a_release_is_seen_by_the_next_owner<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let payload = Payload::new(1);
    let first = take(&pool, account, 1).unwrap();
    payload.write(first[0]);
    let other = {
        let (pool, payload) = (Arc::clone(&pool), Arc::clone(&payload));
        loom::thread::spawn(move || {
            if let Ok(blocks) = take(&pool, account, 1) {
                payload.write(blocks[0]);
                pool.release(&blocks).unwrap();
            }
        })
    };
    pool.release(&first).unwrap();
    other.join().unwrap();
    assert_all_free(&pool);
}

/// The permit comes from one release and the block from another: the claim alone orders the block's owners.
fn a_block_behind_anothers_permit_is_seen_whole<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let payload = Payload::new(2);
    let blocks = take(&pool, account, 2).unwrap();
    pool.release(&blocks[1..]).unwrap();
    let other = {
        let (pool, payload) = (Arc::clone(&pool), Arc::clone(&payload));
        loom::thread::spawn(move || {
            let next = take(&pool, account, 1).unwrap();
            payload.write(next[0]);
            pool.release(&next).unwrap();
        })
    };
    payload.write(blocks[0]);
    pool.release(&blocks[..1]).unwrap();
    other.join().unwrap();
    assert_all_free(&pool);
}

fn two_releases_of_one_block_are_one<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let block = take(&pool, account, 1).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || pool.release(&block).is_ok())
    };
    let mine = pool.release(&block).is_ok();
    assert!(mine ^ other.join().unwrap());
    assert_all_free(&pool);
}

fn two_first_forks_both_count<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let block = take(&pool, account, 1).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || {
            pool.retain(&block).unwrap();
            pool.release(&block).unwrap();
        })
    };
    pool.retain(&block).unwrap();
    other.join().unwrap();
    pool.release(&[block[0], block[0]]).unwrap();
    assert!(pool.release(&block).is_err());
    assert_all_free(&pool);
}

fn last_releases_of_a_shared_block_free_it_once<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let payload = Payload::new(1);
    let block = take(&pool, account, 1).unwrap();
    pool.retain(&block).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || pool.release(&block).unwrap())
    };
    pool.release(&block).unwrap();
    if let Ok(next) = take(&pool, account, 1) {
        payload.write(next[0]);
        pool.release(&next).unwrap();
    }
    other.join().unwrap();
    assert_all_free(&pool);
}

fn a_fork_of_an_evicted_block_is_refused<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let block = take(&pool, account, 1).unwrap();
    pool.index_blocks(&block).unwrap();
    pool.unhold_cached(account, 1).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || {
            assert!(pool.retain(&block).is_err());
            pool.evict(&block).is_ok()
        })
    };
    let mine = pool.evict(&block).is_ok();
    let next = take(&pool, account, 1);
    assert!(mine ^ other.join().unwrap());
    next.iter().for_each(|blocks| pool.release(blocks).unwrap());
    assert_all_free(&pool);
}

fn a_dropped_reservation_serves_the_next<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let reservation = pool.reserve(account, 2).unwrap();
    let other = {
        let pool = Arc::clone(&pool);
        loom::thread::spawn(move || {
            if let Ok(blocks) = take(&pool, account, 1) {
                pool.release(&blocks).unwrap();
            }
        })
    };
    drop(reservation);
    other.join().unwrap();
    assert_all_free(&pool);
}

fn a_quota_moves_while_blocks_do<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let other_account = pool.add_account(Quota { guaranteed: 0, limit: 2 }).unwrap();
    let other = {
        let pool = Arc::clone(&pool);
        loom::thread::spawn(move || {
            if let Ok(blocks) = take(&pool, account, 1) {
                pool.release(&blocks).unwrap();
            }
        })
    };
    let _ = pool.set_quota(account, Quota { guaranteed: 1, limit: 2 });
    let _ = pool.set_quota(other_account, Quota { guaranteed: 1, limit: 1 });
    other.join().unwrap();
    assert_all_free(&pool);
}

fn a_magazine_flushes_beside_an_allocation<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let payload = Payload::new(2);
    let mut magazine = Magazine::new(&pool, account).unwrap();
    let block = magazine.allocate().unwrap();
    payload.write(block);
    let other = {
        let (pool, payload) = (Arc::clone(&pool), Arc::clone(&payload));
        loom::thread::spawn(move || {
            if let Ok(blocks) = take(&pool, account, 2) {
                blocks.iter().for_each(|block| payload.write(*block));
                pool.release(&blocks).unwrap();
            }
        })
    };
    magazine.release(block).unwrap();
    drop(magazine);
    other.join().unwrap();
    assert_all_free(&pool);
}

fn a_closing_step_loses_nothing<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let block = take(&pool, account, 1).unwrap();
    let step = pool.open_step().unwrap();
    let other = {
        let pool = Arc::clone(&pool);
        loom::thread::spawn(move || pool.close_step(step).unwrap())
    };
    pool.release(&block).unwrap();
    other.join().unwrap();
    assert_all_free(&pool);
}

fn a_pin_that_ends_while_its_step_closes_gives_its_capacity_back<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let block = take(&pool, account, 1).unwrap();
    pool.index_blocks(&block).unwrap();
    let step = pool.open_step().unwrap();
    let other = {
        let pool = Arc::clone(&pool);
        loom::thread::spawn(move || pool.close_step(step).unwrap())
    };
    pool.unhold_cached(account, 1).unwrap();
    other.join().unwrap();
    assert_eq!((pool.stats().cached, pool.stats().quarantined), (1, 0));
    pool.evict(&block).unwrap();
    assert_all_free(&pool);
}

fn a_block_freed_beside_a_fruitless_look_is_found<const F: u8>() {
    let (pool, account) = pool::<F>(3);
    let all = take(&pool, account, 3).unwrap();
    pool.release(&all[2..]).unwrap();
    let other = {
        let (pool, first) = (Arc::clone(&pool), all[0]);
        loom::thread::spawn(move || pool.release(&[first]).unwrap())
    };
    // Looks at the first group, which has no free block yet, and finds the second.
    let block = take(&pool, account, 1).unwrap();
    other.join().unwrap();
    pool.check_invariants().unwrap();
    pool.release(&[block[0], all[1]]).unwrap();
    assert_all_free(&pool);
}

/// Two owners of a block release it at once, one of them within a step: whoever comes last, the step keeps it.
fn a_shared_block_released_in_a_step_waits_for_it<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let block = take(&pool, account, 1).unwrap();
    pool.retain(&block).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || pool.release(&block).unwrap())
    };
    let step = pool.open_step().unwrap();
    pool.release(&block).unwrap();
    assert!(take(&pool, account, 1).is_err(), "handed out while the step is open");
    other.join().unwrap();
    assert!(take(&pool, account, 1).is_err(), "handed out while the step is open");
    pool.close_step(step).unwrap();
    assert_all_free(&pool);
}

/// One owner of a shared block releases it, the other makes it the index's as soon as it is alone.
fn a_release_leaves_the_block_of_the_last_owner_alone<const F: u8>() {
    let (pool, account) = pool::<F>(1);
    let block = take(&pool, account, 1).unwrap();
    pool.retain(&block).unwrap();
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || pool.index_blocks(&block).is_ok())
    };
    pool.release(&block).unwrap();
    if !other.join().unwrap() {
        pool.index_blocks(&block).unwrap();
    }
    assert_eq!(pool.stats().held, 1);
    pool.check_invariants().unwrap();
    pool.unhold_cached(account, 1).unwrap();
    pool.evict(&block).unwrap();
    assert_all_free(&pool);
}

/// A release that fails is not seen by those who share one of its blocks, nor by who forks another.
fn a_failing_release_takes_nothing_from_others<const F: u8>() {
    let (pool, account) = pool::<F>(4);
    let blocks = take(&pool, account, 3).unwrap();
    pool.retain(&blocks[..1]).unwrap();
    let bad = BlockHandle::new(9, BlockId(3));
    let other = {
        let (pool, blocks) = (Arc::clone(&pool), blocks.clone());
        loom::thread::spawn(move || assert!(pool.release(&[blocks[0], blocks[2], bad]).is_err()))
    };
    pool.release(&blocks[..1]).unwrap();
    pool.retain(&blocks[2..]).unwrap();
    other.join().unwrap();
    assert!(pool.is_exclusive(blocks[0]).unwrap());
    pool.release(&[blocks[0], blocks[1], blocks[2], blocks[2]]).unwrap();
    assert_all_free(&pool);
}

/// A fork that fails at its second block holds nothing of the first, whose owner releases it meanwhile.
fn a_failing_fork_keeps_nothing<const F: u8>() {
    let (pool, account) = pool::<F>(2);
    let block = take(&pool, account, 1).unwrap();
    let bad = BlockHandle::new(9, BlockId(1));
    let other = {
        let (pool, block) = (Arc::clone(&pool), block.clone());
        loom::thread::spawn(move || assert!(pool.retain(&[block[0], bad]).is_err()))
    };
    pool.release(&block).unwrap();
    let all = take(&pool, account, 2).expect("a fork that fails is not seen");
    pool.release(&all).unwrap();
    other.join().unwrap();
    assert_all_free(&pool);
}

/// A fork of two blocks loses the race for the second to its owner's release: the first comes back whole.
fn a_fork_that_loses_a_race_gives_back_what_it_has<const F: u8>() {
    let (pool, account) = pool::<F>(3);
    let blocks = take(&pool, account, 3).unwrap();
    let step = pool.open_step().unwrap();
    let other = {
        let (pool, blocks) = (Arc::clone(&pool), blocks.clone());
        loom::thread::spawn(move || pool.release(&blocks[2..]).unwrap())
    };
    let forked = pool.retain(&[blocks[0], blocks[2]]).is_ok();
    other.join().unwrap();
    assert_eq!(pool.stats().quarantined, u64::from(!forked));
    assert_eq!(pool.is_exclusive(blocks[0]).unwrap(), !forked);
    if forked {
        pool.release(&[blocks[0], blocks[2]]).unwrap();
    }
    pool.release(&blocks[..2]).unwrap();
    pool.close_step(step).unwrap();
    assert_all_free(&pool);
}

/// Two releases of the same two blocks, which are in two groups: one wins both, or neither has anything.
fn releases_of_the_same_batch_do_not_split_it<const F: u8>() {
    let (pool, account) = pool::<F>(3);
    let blocks = take(&pool, account, 3).unwrap();
    let other = {
        let (pool, blocks) = (Arc::clone(&pool), blocks.clone());
        loom::thread::spawn(move || pool.release(&[blocks[2], blocks[0]]).is_ok())
    };
    let mine = pool.release(&[blocks[0], blocks[2]]).is_ok();
    let theirs = other.join().unwrap();
    assert!(!(mine && theirs));
    pool.check_invariants().unwrap();
    assert_eq!(pool.stats().free, if mine || theirs { 2 } else { 0 });
}

/// A release that read the epoch before its close comes to the list when the next epoch has the slot: its block
/// comes back, and the next epoch's not early.
fn a_late_push_meets_the_next_epoch<const F: u8>() {
    let (pool, account) = pool_with_steps::<F>(2, 1);
    let blocks = take(&pool, account, 2).unwrap();
    let step = pool.open_step().unwrap();
    let other = {
        let (pool, blocks) = (Arc::clone(&pool), blocks.clone());
        loom::thread::spawn(move || pool.release(&blocks[..1]).unwrap())
    };
    pool.close_step(step).unwrap();
    let next = pool.open_step().unwrap();
    pool.release(&blocks[1..]).unwrap();
    assert!(take(&pool, account, 2).is_err(), "the next step keeps its block");
    pool.close_step(next).unwrap();
    other.join().unwrap();
    assert_all_free(&pool);
}

/// The same with the capacity of a pin.
fn a_late_unpin_meets_the_next_epoch<const F: u8>() {
    let (pool, account) = pool_with_steps::<F>(2, 1);
    let blocks = take(&pool, account, 2).unwrap();
    pool.index_blocks(&blocks).unwrap();
    let step = pool.open_step().unwrap();
    let other = {
        let pool = Arc::clone(&pool);
        loom::thread::spawn(move || assert!(pool.unhold_cached(account, 1).is_ok()))
    };
    pool.close_step(step).unwrap();
    let next = pool.open_step().unwrap();
    pool.unhold_cached(account, 1).unwrap();
    assert!(pool.account_stats(account).unwrap().committed >= 1, "the next step keeps its capacity");
    pool.close_step(next).unwrap();
    other.join().unwrap();
    assert_eq!((pool.stats().cached, pool.stats().quarantined), (2, 0));
    pool.evict(&blocks).unwrap();
    assert_all_free(&pool);
}

macro_rules! sound {
    ($($name:ident),* $(,)?) => {
        mod sound {
            $(#[test] fn $name() { super::explore_up_to(super::EVERY, super::$name::<{ super::faults::NONE }>) })*
        }
    };
    (up to $preemptions:literal: $($name:ident),* $(,)?) => {
        mod bounded {
            $(#[test] fn $name() {
                super::explore_up_to($preemptions, super::$name::<{ super::faults::NONE }>)
            })*
        }
    };
}

sound!(
    allocate_against_allocate,
    a_release_is_seen_by_the_next_owner,
    a_block_behind_anothers_permit_is_seen_whole,
    two_releases_of_one_block_are_one,
    two_first_forks_both_count,
    last_releases_of_a_shared_block_free_it_once,
    a_fork_of_an_evicted_block_is_refused,
    a_dropped_reservation_serves_the_next,
    a_quota_moves_while_blocks_do,
    a_magazine_flushes_beside_an_allocation,
    a_closing_step_loses_nothing,
    a_pin_that_ends_while_its_step_closes_gives_its_capacity_back,
    a_block_freed_beside_a_fruitless_look_is_found,
    a_shared_block_released_in_a_step_waits_for_it,
    a_release_leaves_the_block_of_the_last_owner_alone,
    a_failing_release_takes_nothing_from_others,
    a_failing_fork_keeps_nothing,
    a_fork_that_loses_a_race_gives_back_what_it_has,
    releases_of_the_same_batch_do_not_split_it,
);

sound!(up to 2:
    a_late_push_meets_the_next_epoch,
    a_late_unpin_meets_the_next_epoch,
);

/// Faults that only an interleaving shows.
mod planted {
    use super::*;

    #[test]
    #[should_panic = "no block was found behind a free permit"]
    fn permits_before_the_bits_are_seen() {
        explore_up_to(EVERY, a_release_is_seen_by_the_next_owner::<{ faults::EARLY_PERMIT }>);
    }

    #[test]
    #[should_panic]
    fn a_push_after_the_close_is_missed() {
        explore_up_to(EVERY, a_closing_step_loses_nothing::<{ faults::LOSE_LATE_PUSH }>);
    }

    #[test]
    #[should_panic = "the summary does not show"]
    fn a_summary_bit_cleared_blindly_is_seen() {
        explore_up_to(EVERY, a_block_freed_beside_a_fruitless_look_is_found::<{ faults::BLIND_SUMMARY }>);
    }

    #[test]
    #[should_panic]
    fn a_torn_quota_is_seen() {
        explore_up_to(EVERY, a_quota_moves_while_blocks_do::<{ faults::TORN_QUOTA }>);
    }

    #[test]
    #[should_panic]
    fn torn_references_are_seen() {
        explore_up_to(EVERY, last_releases_of_a_shared_block_free_it_once::<{ faults::TORN_REFERENCES }>);
    }

    #[test]
    #[should_panic]
    fn a_claim_that_acquires_nothing_is_seen() {
        explore_up_to(EVERY, a_block_behind_anothers_permit_is_seen_whole::<{ faults::RELAXED_BITS }>);
    }
}
