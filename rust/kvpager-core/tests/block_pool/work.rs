//! Random legal work of many threads on one pool, with what its blocks' owners write unguarded. Models with random
//! schedules run it, and a plain program under the thread sanitizer.

use kvpager_core::block_pool::{BlockPool, Magazine, PoolConfig, Quota, Reservation, StepEpoch};
use kvpager_core::sync::{AtomicU64, Ordering};
use kvpager_core::{AccountId, BlockHandle, BlockId, Error};
use std::cell::UnsafeCell;
use std::sync::Arc;

const NOTHING: u64 = u64::MAX;

/// What threads work on.
pub(crate) struct Shared<const F: u8> {
    pub(crate) pool: Arc<BlockPool<F>>,
    accounts: Vec<AccountId>,
    /// By block: the generation in which its owner has it. Plain memory: an access that is not ordered after the
    /// last owner's is a race.
    payload: Vec<UnsafeCell<u32>>,
    /// References on their way from one thread to another, by account.
    passed: Vec<AtomicU64>,
}

// SAFETY: `payload` is written by whom the pool gave a block, and read by who holds a reference; that this is so is
// what the work checks.
unsafe impl<const F: u8> Sync for Shared<F> {}
// SAFETY: as above.
unsafe impl<const F: u8> Send for Shared<F> {}

impl<const F: u8> Shared<F> {
    pub(crate) fn new(num_blocks: u32, num_threads: u32) -> Self {
        let config = PoolConfig { num_blocks, max_accounts: 2, max_open_steps: num_threads };
        let pool = BlockPool::<F>::with_fault(config).unwrap();
        let quota = Quota { guaranteed: num_blocks / 4, limit: num_blocks };
        Self {
            accounts: (0..2).map(|_| pool.add_account(quota).unwrap()).collect(),
            payload: (0..num_blocks).map(|_| UnsafeCell::new(u32::MAX)).collect(),
            passed: (0..2).map(|_| AtomicU64::new(NOTHING)).collect(),
            pool,
        }
    }

    fn write(&self, block: BlockHandle) {
        // SAFETY: the pool has just given the block to this thread alone.
        unsafe { *self.payload[block.id().0 as usize].get() = block.generation() };
    }

    fn check(&self, block: BlockHandle) {
        // SAFETY: this thread holds a reference, so nobody writes.
        let generation = unsafe { *self.payload[block.id().0 as usize].get() };
        assert_eq!(generation, block.generation(), "block {} has another owner", block.id());
    }

    /// After all threads have ended: nothing is lost.
    pub(crate) fn finish(&self, cached: Vec<BlockHandle>) {
        self.pool.evict(&cached).unwrap();
        for cell in &self.passed {
            let bits = cell.swap(NOTHING, Ordering::AcqRel);
            if bits != NOTHING {
                self.pool.release(&[BlockHandle::from_bits(bits)]).unwrap();
            }
        }
        self.pool.check_invariants().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.free, stats.quarantined), (stats.capacity, 0), "{stats:?}");
    }
}

/// A thread at work.
pub(crate) struct Worker<'a, const F: u8> {
    shared: &'a Shared<F>,
    account: usize,
    random: u64,
    /// One reference each, and the place of the account.
    held: Vec<(BlockHandle, usize)>,
    stale: Option<BlockHandle>,
    cached: Vec<(BlockHandle, Option<StepEpoch>)>,
    reservation: Option<Reservation<F>>,
    magazine: Option<Magazine<F>>,
    step: Option<StepEpoch>,
}

fn blank(count: usize) -> Vec<BlockHandle> {
    vec![BlockHandle::new(0, BlockId(0)); count]
}

impl<'a, const F: u8> Worker<'a, F> {
    pub(crate) fn new(shared: &'a Shared<F>, thread: usize, seed: u64) -> Self {
        Self {
            shared,
            account: thread % shared.accounts.len(),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (thread as u64 + 1) << 40 | 1,
            held: Vec::new(),
            stale: None,
            cached: Vec::new(),
            reservation: None,
            magazine: None,
            step: None,
        }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 33) as usize % bound
    }

    fn got(&mut self, blocks: &[BlockHandle]) {
        blocks.iter().for_each(|block| self.shared.write(*block));
        self.held.extend(blocks.iter().map(|block| (*block, self.account)));
    }

    fn id(&self) -> AccountId {
        self.shared.accounts[self.account]
    }

    fn some_held(&mut self, most: usize) -> Vec<(BlockHandle, usize)> {
        let count = self.below(most + 1).min(self.held.len());
        let mut taken = Vec::new();
        for _ in 0..count {
            let at = self.below(self.held.len());
            taken.push(self.held.swap_remove(at));
        }
        taken
    }

    pub(crate) fn work(&mut self, operations: usize) {
        for _ in 0..operations {
            match self.below(16) {
                0..4 => self.allocate(),
                4..7 => self.release(),
                7 => self.fork(),
                8 => self.pass(),
                9 => self.reserve(),
                10 => self.draw(),
                11 => self.store(),
                12 => self.turn(),
                13 => self.index(),
                14 => self.evict(),
                _ => self.misuse(),
            }
        }
    }

    fn allocate(&mut self) {
        let mut out = blank(1 + self.below(3));
        match self.shared.pool.allocate(self.id(), &mut out) {
            Ok(()) => self.got(&out),
            Err(Error::OutOfBlocks { .. } | Error::OverQuota { .. } | Error::NeedsReclaim { .. }) => (),
            Err(other) => panic!("{other}"),
        }
    }

    fn release(&mut self) {
        let blocks: Vec<_> = self.some_held(4).into_iter().map(|(block, _)| block).collect();
        blocks.iter().for_each(|block| self.shared.check(*block));
        if let [block] = blocks[..]
            && self.shared.pool.is_exclusive(block).unwrap()
        {
            self.stale = Some(block);
        }
        self.shared.pool.release(&blocks).unwrap();
    }

    fn fork(&mut self) {
        let taken = self.some_held(2);
        let blocks: Vec<_> = taken.iter().map(|(block, _)| *block).collect();
        self.shared.pool.retain(&blocks).unwrap();
        self.held.extend(taken.iter().chain(&taken));
    }

    /// Leaves a reference for another thread, and takes one that was left.
    fn pass(&mut self) {
        let Some((mine, account)) = self.held.pop() else { return };
        let theirs = self.shared.passed[account].swap(mine.to_bits(), Ordering::AcqRel);
        if theirs != NOTHING {
            let block = BlockHandle::from_bits(theirs);
            self.shared.check(block);
            self.held.push((block, account));
        }
    }

    fn reserve(&mut self) {
        self.reservation = None;
        let count = 1 + self.below(3) as u32;
        self.reservation = self.shared.pool.reserve(self.id(), count).ok();
    }

    fn draw(&mut self) {
        let Some(mut reservation) = self.reservation.take() else { return };
        let mut out = blank(1);
        if reservation.num_blocks() > 0 && reservation.allocate(&mut out).is_ok() {
            self.got(&out);
            // Refused while a step is open.
            if reservation.put_back(&out).is_ok() {
                self.held.pop();
            }
        }
        self.reservation = Some(reservation);
    }

    fn store(&mut self) {
        if self.magazine.is_none() {
            self.magazine = Magazine::new(&self.shared.pool, self.id()).ok();
        }
        let Some(mut magazine) = self.magazine.take() else { return };
        if self.below(4) == 0 {
            return;
        }
        if let Ok(block) = magazine.allocate() {
            self.got(&[block]);
        }
        if let Some((block, _)) = self.held.pop() {
            self.shared.check(block);
            magazine.release(block).unwrap();
        }
        self.magazine = Some(magazine);
    }

    /// Closes the open step or opens one, and changes the quota.
    fn turn(&mut self) {
        match self.step.take() {
            Some(step) => self.shared.pool.close_step(step).unwrap(),
            None => self.step = self.shared.pool.open_step().ok(),
        }
        let num_blocks = self.shared.pool.num_blocks();
        let guaranteed = self.below(num_blocks as usize / 4 + 1) as u32;
        // Refused while what it takes is lent out.
        let _ = self.shared.pool.set_quota(self.id(), Quota { guaranteed, limit: num_blocks });
    }

    fn index(&mut self) {
        let Some((block, account)) = self.held.pop() else { return };
        self.shared.check(block);
        // Refused if it is shared.
        if self.shared.pool.index_blocks(&[block]).is_err() {
            return self.held.push((block, account));
        }
        assert!(self.shared.pool.retain(&[block]).is_err(), "an indexed block is held by pins");
        let waits = self.shared.pool.unhold_cached(self.shared.accounts[account], 1).unwrap();
        self.cached.push((block, waits));
    }

    fn evict(&mut self) {
        let pool = &self.shared.pool;
        let Some(at) =
            self.cached.iter().position(|(_, waits)| waits.is_none_or(|epoch| pool.epoch_closed(epoch)))
        else {
            return;
        };
        let (block, _) = self.cached.swap_remove(at);
        pool.evict(&[block]).unwrap();
        assert!(pool.retain(&[block]).is_err(), "an evicted block can be had no more");
    }

    /// Lets go of everything, except cached blocks that a step may still read.
    pub(crate) fn end(mut self) -> Vec<BlockHandle> {
        (self.reservation, self.magazine) = (None, None);
        let blocks: Vec<_> = self.held.drain(..).map(|(block, _)| block).collect();
        self.shared.pool.release(&blocks).unwrap();
        if let Some(step) = self.step {
            self.shared.pool.close_step(step).unwrap();
        }
        self.cached.into_iter().map(|(block, _)| block).collect()
    }

    /// A handle from before its block's release is refused, whatever became of the block.
    fn misuse(&mut self) {
        if let Some(stale) = self.stale {
            assert!(self.shared.pool.release(&[stale]).is_err(), "a stale handle was accepted");
            assert!(self.shared.pool.retain(&[stale]).is_err(), "a stale handle was accepted");
        }
    }
}
