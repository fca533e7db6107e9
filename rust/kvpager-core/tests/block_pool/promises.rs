//! One check for each promise. Each is a test of the pool, and is run against every planted fault by `mutants`.

use crate::support::{assert_all_free, blank, picture, pool, take};
use kvpager_core::block_pool::{BlockPool, Magazine, PoolConfig, Quota, faults};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error, HandleFault};
use std::collections::HashSet;
use std::sync::Arc;

macro_rules! promises {
    ($($(#[$attribute:meta])* fn $name:ident<$fault:ident>() $body:block)*) => {
        $($(#[$attribute])* pub(crate) fn $name<const $fault: u8>() $body)*

        /// Every promise by name.
        pub(crate) fn all<const F: u8>() -> Vec<(&'static str, fn())> {
            vec![$((stringify!($name), $name::<F> as fn())),*]
        }

        mod sound {
            $(#[test] fn $name() { super::$name::<{ super::faults::NONE }>() })*
        }
    };
}

fn fault_of(error: Error) -> HandleFault {
    match error {
        Error::InvalidHandle { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

promises! {
    fn a_batch_is_all_or_nothing<F>() {
        let (pool, account) = pool::<F>(100);
        let held = take(&pool, account, 60).unwrap();
        let before = picture(&pool);
        let error = take(&pool, account, 41).unwrap_err();
        assert_eq!(error, Error::OverQuota { account, needed: 41, available: 40, limit: 100 });
        assert_eq!(picture(&pool), before);
        let rest = take(&pool, account, 40).unwrap();
        let ids: HashSet<_> = held.iter().chain(&rest).map(|block| block.id()).collect();
        assert_eq!(ids.len(), 100);
        pool.release(&held).unwrap();
        pool.release(&rest).unwrap();
        assert_all_free(&pool);
    }

    fn every_block_can_be_had_again_and_again<F>() {
        let (pool, account) = pool::<F>(1_000);
        for size in [1, 7, 24, 100, 1_000] {
            let batches: Vec<_> = (0..1_000 / size).map(|_| take(&pool, account, size).unwrap()).collect();
            for batch in batches.iter().rev() {
                pool.release(batch).unwrap();
            }
            assert_all_free(&pool);
        }
    }

    fn a_double_release_is_refused_and_changes_nothing<F>() {
        let (pool, account) = pool::<F>(10);
        let blocks = take(&pool, account, 3).unwrap();
        pool.release(&blocks[..1]).unwrap();
        let before = picture(&pool);
        assert_eq!(fault_of(pool.release(&blocks[..1]).unwrap_err()), HandleFault::Stale);
        assert_eq!(fault_of(pool.release(&[blocks[1], blocks[2], blocks[0]]).unwrap_err()), HandleFault::Stale);
        let twice = [blocks[1], blocks[2], blocks[1]];
        assert_eq!(fault_of(pool.release(&twice).unwrap_err()), HandleFault::OverRelease);
        assert_eq!(picture(&pool), before);
        pool.release(&blocks[1..]).unwrap();
        assert_all_free(&pool);
    }

    fn a_stale_handle_is_refused_after_the_block_was_handed_out_again<F>() {
        let (pool, account) = pool::<F>(1);
        let old = take(&pool, account, 1).unwrap()[0];
        pool.release(&[old]).unwrap();
        let new = take(&pool, account, 1).unwrap()[0];
        assert_eq!(old.id(), new.id());
        for call in [BlockPool::release, BlockPool::retain, BlockPool::index_blocks, BlockPool::evict] {
            assert_eq!(fault_of(call(&pool, &[old]).unwrap_err()), HandleFault::Stale);
        }
        assert!(pool.is_exclusive(old).is_err());
        assert!(pool.is_exclusive(new).unwrap());
        pool.release(&[new]).unwrap();
        assert_all_free(&pool);
    }

    fn a_handle_that_was_never_issued_is_refused<F>() {
        let (pool, account) = pool::<F>(30);
        let blocks = take(&pool, account, 2).unwrap();
        let before = picture(&pool);
        let never = [
            BlockHandle::new(0, BlockId(30)),
            BlockHandle::new(0, BlockId(u32::MAX)),
            BlockHandle::new(0, BlockId(29)),
            BlockHandle::new(7, blocks[0].id()),
        ];
        for handle in never {
            for call in [BlockPool::release, BlockPool::retain, BlockPool::index_blocks] {
                let error = call(&pool, &[blocks[0], blocks[1], handle]).unwrap_err();
                assert_eq!(fault_of(error), HandleFault::NeverIssued);
            }
        }
        assert_eq!(picture(&pool), before);
    }

    fn a_shared_block_counts_once_and_is_freed_by_its_last_release<F>() {
        let (pool, account) = pool::<F>(10);
        let blocks = take(&pool, account, 4).unwrap();
        pool.retain(&blocks).unwrap();
        pool.retain(&[blocks[0], blocks[0]]).unwrap();
        assert_eq!(pool.stats().held, 4);
        assert!(!pool.is_exclusive(blocks[0]).unwrap());
        pool.release(&blocks).unwrap();
        assert!(pool.is_exclusive(blocks[1]).unwrap());
        assert_eq!(pool.stats().held, 4);
        pool.release(&blocks).unwrap();
        assert_eq!(pool.stats().held, 1);
        let before = picture(&pool);
        assert_eq!(fault_of(pool.release(&[blocks[0]; 3]).unwrap_err()), HandleFault::OverRelease);
        assert_eq!(picture(&pool), before);
        pool.release(&[blocks[0]; 2]).unwrap();
        assert_all_free(&pool);
    }

    fn a_mixed_batch_that_fails_changes_nothing<F>() {
        let (pool, account) = pool::<F>(100);
        let blocks = take(&pool, account, 60).unwrap();
        let shared: Vec<_> = blocks.iter().copied().step_by(2).collect();
        pool.retain(&shared).unwrap();
        let gone = take(&pool, account, 1).unwrap()[0];
        pool.release(&[gone]).unwrap();
        let before = picture(&pool);
        let batch: Vec<_> = blocks.iter().copied().chain([gone]).collect();
        for call in [BlockPool::release, BlockPool::retain, BlockPool::index_blocks] {
            assert!(call(&pool, &batch).is_err());
            assert_eq!(picture(&pool), before);
        }
        let thrice: Vec<_> = blocks.iter().chain(&shared).chain(&shared).copied().collect();
        assert!(pool.release(&thrice).is_err());
        assert_eq!(picture(&pool), before);
        let twice: Vec<_> = blocks.iter().chain(&shared).copied().collect();
        pool.release(&twice).unwrap();
        assert_all_free(&pool);
    }

    fn what_is_reserved_can_always_be_drawn<F>() {
        let (pool, account) = pool::<F>(10);
        let mut reservation = pool.reserve(account, 6).unwrap();
        assert!(take(&pool, account, 5).is_err());
        let others = take(&pool, account, 4).unwrap();
        let mut drawn = blank(6);
        reservation.allocate(&mut drawn).unwrap();
        assert_eq!(reservation.num_blocks(), 0);
        assert!(reservation.allocate(&mut blank(1)).is_err());
        pool.release(&drawn).unwrap();
        pool.release(&others).unwrap();
        assert_all_free(&pool);
    }

    fn a_dropped_reservation_gives_the_rest_back<F>() {
        let (pool, account) = pool::<F>(10);
        let mut reservation = pool.reserve(account, 6).unwrap();
        let mut drawn = blank(2);
        reservation.allocate(&mut drawn).unwrap();
        reservation.grow(3).unwrap();
        reservation.shrink(1).unwrap();
        assert!(reservation.shrink(7).is_err());
        assert_eq!((pool.stats().reserved, pool.stats().held), (6, 2));
        assert_eq!(pool.account_stats(account).unwrap().reserved, 6);
        drop(reservation);
        pool.release(&drawn).unwrap();
        assert_all_free(&pool);
    }

    fn blocks_put_back_stay_promised<F>() {
        let (pool, account) = pool::<F>(10);
        let mut reservation = pool.reserve(account, 4).unwrap();
        let mut drawn = blank(4);
        reservation.allocate(&mut drawn).unwrap();
        let others = take(&pool, account, 6).unwrap();
        assert!(reservation.put_back(&[drawn[0], others[0], others[0]]).is_err());
        reservation.put_back(&drawn[..3]).unwrap();
        assert_eq!((pool.stats().reserved, pool.stats().free, pool.stats().held), (3, 3, 7));
        pool.check_invariants().unwrap();
        assert!(take(&pool, account, 1).is_err());
        assert!(reservation.put_back(&drawn[..1]).is_err());
        reservation.allocate(&mut blank(2)).unwrap();
        reservation.shrink(1).unwrap();
        assert!(take(&pool, account, 1).is_ok());
        pool.check_invariants().unwrap();
    }

    fn reservations_are_counted_with_and_without_lanes<F>() {
        let (pool, account) = pool::<F>(1_000);
        let mut reservations: Vec<_> = (0..400).map(|_| pool.reserve(account, 2).unwrap()).collect();
        let mut drawn = blank(400);
        for (reservation, out) in reservations.iter_mut().zip(drawn.chunks_mut(1)) {
            reservation.allocate(out).unwrap();
        }
        assert_eq!((pool.stats().reserved, pool.stats().held), (400, 400));
        pool.check_invariants().unwrap();
        for (reservation, block) in reservations.iter_mut().zip(&drawn) {
            reservation.put_back(&[*block]).unwrap();
        }
        assert_eq!((pool.stats().reserved, pool.stats().free), (800, 1_000));
        pool.check_invariants().unwrap();
        drop(reservations);
        assert_all_free(&pool);
    }

    fn a_guarantee_is_there_whatever_others_take<F>() {
        let (pool, greedy) = pool::<F>(100);
        let promised = pool.add_account(Quota { guaranteed: 30, limit: 50 }).unwrap();
        let error = take(&pool, greedy, 71).unwrap_err();
        assert_eq!(error, Error::OutOfBlocks { needed: 71, available: 70, capacity: 100 });
        let lent = take(&pool, greedy, 70).unwrap();
        let own = take(&pool, promised, 30).unwrap();
        assert_eq!(
            take(&pool, promised, 1).unwrap_err(),
            Error::OutOfBlocks { needed: 1, available: 0, capacity: 100 }
        );
        pool.release(&lent[..25]).unwrap();
        let more = take(&pool, promised, 20).unwrap();
        assert_eq!(
            take(&pool, promised, 1).unwrap_err(),
            Error::OverQuota { account: promised, needed: 1, available: 0, limit: 50 }
        );
        pool.check_invariants().unwrap();
        for batch in [&lent[25..], &own, &more] {
            pool.release(batch).unwrap();
        }
        assert_all_free(&pool);
    }

    fn a_quota_changes_while_blocks_are_in_use<F>() {
        let (pool, account) = pool::<F>(100);
        let other = pool.add_account(Quota { guaranteed: 20, limit: 100 }).unwrap();
        let blocks = take(&pool, account, 70).unwrap();
        assert!(pool.set_quota(other, Quota { guaranteed: 31, limit: 100 }).is_err());
        assert_eq!(pool.quota(other).unwrap(), Quota { guaranteed: 20, limit: 100 });
        pool.set_quota(other, Quota { guaranteed: 30, limit: 100 }).unwrap();
        pool.set_quota(account, Quota { guaranteed: 50, limit: 60 }).unwrap();
        assert!(take(&pool, account, 1).is_err());
        pool.release(&blocks[..11]).unwrap();
        let one = take(&pool, account, 1).unwrap();
        assert!(take(&pool, account, 1).is_err());
        pool.check_invariants().unwrap();
        pool.release(&blocks[11..]).unwrap();
        pool.release(&one).unwrap();
        pool.set_quota(account, Quota { guaranteed: 0, limit: 100 }).unwrap();
        assert_all_free(&pool);
    }

    fn nothing_is_handed_out_before_its_step_closes<F>() {
        let (pool, account) = pool::<F>(8);
        let blocks = take(&pool, account, 6).unwrap();
        let first = pool.open_step().unwrap();
        pool.release(&blocks[..2]).unwrap();
        let second = pool.open_step().unwrap();
        pool.retain(&blocks[2..3]).unwrap();
        pool.release(&[blocks[2], blocks[3], blocks[2]]).unwrap();
        assert_eq!(pool.stats().quarantined, 4);
        assert!(pool.release(&blocks[..1]).is_err());
        pool.check_invariants().unwrap();
        assert!(take(&pool, account, 3).is_err());
        pool.close_step(second).unwrap();
        assert_eq!(pool.stats().quarantined, 4, "the first step may still read them");
        assert!(!pool.epoch_closed(second));
        pool.close_step(first).unwrap();
        assert!(pool.epoch_closed(second));
        assert!(pool.close_step(first).is_err());
        pool.check_invariants().unwrap();
        assert_eq!(take(&pool, account, 6).unwrap().len(), 6);
    }

    fn steps_may_wrap_around_their_slots<F>() {
        let config = PoolConfig { num_blocks: 64, max_accounts: 2, max_open_steps: 2 };
        let pool = BlockPool::<F>::with_fault(config).unwrap();
        let account = pool.add_account(Quota { guaranteed: 0, limit: 64 }).unwrap();
        let mut open = vec![pool.open_step().unwrap(), pool.open_step().unwrap()];
        assert!(matches!(pool.open_step(), Err(Error::WrongState(_))));
        for _ in 0..100 {
            let blocks = take(&pool, account, 5).unwrap();
            pool.release(&blocks).unwrap();
            assert!(pool.stats().quarantined >= 5);
            pool.close_step(open.remove(0)).unwrap();
            open.push(pool.open_step().unwrap());
            pool.check_invariants().unwrap();
        }
        open.into_iter().for_each(|epoch| pool.close_step(epoch).unwrap());
        assert_all_free(&pool);
    }

    fn cached_blocks_are_in_the_way_until_evicted<F>() {
        let (pool, account) = pool::<F>(10);
        let blocks = take(&pool, account, 8).unwrap();
        pool.index_blocks(&blocks).unwrap();
        assert!(pool.release(&blocks).is_err());
        assert!(pool.retain(&blocks).is_err());
        assert!(!pool.is_exclusive(blocks[0]).unwrap());
        assert_eq!(pool.unhold_cached(account, 8).unwrap(), None);
        assert_eq!((pool.stats().cached, pool.stats().held, pool.stats().free), (8, 0, 2));
        let mut reservation = pool.reserve(account, 5).unwrap();
        let refused = Error::NeedsReclaim { needed: 5, free: 2, cached: 8 };
        assert_eq!(reservation.allocate(&mut blank(5)).unwrap_err(), refused);
        assert_eq!(take(&pool, account, 5).unwrap_err(), refused);
        let before = picture(&pool);
        assert!(pool.evict(&[blocks[0], blocks[1], blocks[0]]).is_err());
        assert_eq!(picture(&pool), before);
        pool.evict(&blocks[..3]).unwrap();
        assert!(pool.evict(&blocks[..1]).is_err());
        reservation.allocate(&mut blank(5)).unwrap();
        pool.check_invariants().unwrap();
        let account_stats = pool.account_stats(account).unwrap();
        assert_eq!((account_stats.cached, account_stats.held, account_stats.committed), (5, 5, 5));
    }

    fn a_pin_takes_capacity_and_an_unpin_in_a_step_keeps_it<F>() {
        let (pool, account) = pool::<F>(10);
        let blocks = take(&pool, account, 8).unwrap();
        pool.index_blocks(&blocks).unwrap();
        pool.unhold_cached(account, 8).unwrap();
        let other = take(&pool, account, 2).unwrap();
        pool.hold_cached(account, 8).unwrap();
        assert!(pool.hold_cached(account, 1).is_err());
        let epoch = pool.open_step().unwrap();
        assert_eq!(pool.unhold_cached(account, 5).unwrap(), Some(epoch));
        assert_eq!((pool.stats().held, pool.stats().quarantined, pool.stats().cached), (5, 5, 0));
        assert!(pool.reserve(account, 1).is_err());
        pool.check_invariants().unwrap();
        pool.close_step(epoch).unwrap();
        assert_eq!((pool.stats().held, pool.stats().quarantined, pool.stats().cached), (5, 0, 5));
        pool.unhold_cached(account, 3).unwrap();
        assert!(pool.unhold_cached(account, 3).is_err());
        pool.evict(&blocks).unwrap();
        pool.release(&other).unwrap();
        assert_all_free(&pool);
    }

    fn a_copy_is_traded_for_the_resident_block_without_room<F>() {
        let (pool, account) = pool::<F>(10);
        let resident = take(&pool, account, 4).unwrap();
        pool.index_blocks(&resident).unwrap();
        pool.unhold_cached(account, 4).unwrap();
        let own = take(&pool, account, 6).unwrap();
        let rest = pool.reserve(account, 4).unwrap();
        assert!(pool.hold_cached(account, 1).is_err());
        assert!(pool.trade_held(account, &own[..4], 5).is_err());
        let step = pool.open_step().unwrap();
        assert!(matches!(pool.trade_held(account, &own[..4], 4), Err(Error::WrongState(_))));
        pool.close_step(step).unwrap();
        pool.trade_held(account, &own[..4], 4).unwrap();
        assert_eq!((pool.stats().held, pool.stats().cached, pool.stats().free), (6, 0, 4));
        pool.check_invariants().unwrap();
        drop(rest);
        pool.unhold_cached(account, 4).unwrap();
        pool.evict(&resident).unwrap();
        pool.release(&own[4..]).unwrap();
        assert_all_free(&pool);
    }

    fn a_magazine_keeps_blocks_and_gives_them_back<F>() {
        let (pool, account) = pool::<F>(200);
        let mut magazine = Magazine::new(&pool, account).unwrap();
        let blocks: Vec<_> = (0..100).map(|_| magazine.allocate().unwrap()).collect();
        assert_eq!(blocks.iter().map(|block| block.id()).collect::<HashSet<_>>().len(), 100);
        pool.check_invariants().unwrap();
        assert_eq!(pool.stats().stranded as usize, magazine.num_blocks());
        for block in &blocks {
            magazine.release(*block).unwrap();
            assert!(magazine.release(*block).is_err());
            assert!(pool.release(&[*block]).is_err());
        }
        pool.check_invariants().unwrap();
        let again = magazine.allocate().unwrap();
        let step = pool.open_step().unwrap();
        magazine.release(again).unwrap();
        assert_eq!(pool.stats().quarantined, 1);
        pool.close_step(step).unwrap();
        drop(magazine);
        assert_all_free(&pool);
    }

    fn a_magazine_takes_the_last_block<F>() {
        let (pool, account) = pool::<F>(3);
        let mut magazine = Magazine::new(&pool, account).unwrap();
        let blocks: Vec<_> = (0..3).map(|_| magazine.allocate().unwrap()).collect();
        assert!(magazine.allocate().is_err());
        blocks.into_iter().for_each(|block| magazine.release(block).unwrap());
        drop(magazine);
        assert_all_free(&pool);
    }

    fn the_peak_is_the_most_that_was_held<F>() {
        let (pool, account) = pool::<F>(10);
        let blocks = take(&pool, account, 7).unwrap();
        pool.release(&blocks[..5]).unwrap();
        let more = take(&pool, account, 3).unwrap();
        assert_eq!((pool.stats().peak_held, pool.stats().held), (7, 5));
        pool.retain(&more).unwrap();
        assert_eq!(pool.stats().peak_held, 7);
    }

    fn nonsense_is_refused_with_the_numbers<F>() {
        for num_blocks in [0, 1 << 31, u32::MAX] {
            let config = PoolConfig { num_blocks, ..PoolConfig::default() };
            assert!(BlockPool::<F>::with_fault(config).unwrap_err().to_string().contains(&num_blocks.to_string()));
        }
        let (pool, account) = pool::<F>(10);
        for quota in [(0, 0), (5, 4), (0, 11), (11, 11)] {
            assert!(pool.add_account(Quota { guaranteed: quota.0, limit: quota.1 }).is_err());
        }
        assert!(pool.add_account(Quota { guaranteed: 10, limit: 10 }).is_ok());
        assert!(pool.reserve(AccountId(2), 1).is_err());
        assert!(pool.reserve(account, u32::MAX).is_err());
        assert!(pool.account_stats(AccountId(9)).is_err());
        assert!(pool.unhold_cached(account, 1).is_err());
    }

    fn threads_lose_and_double_nothing<F>() {
        let (pool, account) = pool::<F>(4_095);
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let pool = Arc::clone(&pool);
                std::thread::spawn(move || {
                    let mut held: Vec<Vec<BlockHandle>> = Vec::new();
                    for round in 0..4_000usize {
                        let size = 1 + (round * 7 + thread * 13) % 40;
                        held.push(take(&pool, account, size).unwrap());
                        if held.len() > 8 {
                            pool.release(&held.remove(0)).unwrap();
                        }
                    }
                    held.into_iter().for_each(|batch| pool.release(&batch).unwrap());
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_all_free(&pool);
        assert_eq!(take(&pool, account, 4_095).unwrap().len(), 4_095);
    }
}
