//! Ways to hand out block ids, behind one interface, so that they are measured side by side; and worlds of prompts
//! for the prefix index ([`prefixes`]).
//!
//! Beside the pool are the plain alternatives: a vector and a queue under a mutex, and crossbeam's array queue.
//! None of those has quotas, reference counts, generations or a quarantine, and none sees a double release.

#![expect(clippy::missing_panics_doc, reason = "a benchmark that runs out of blocks is wrong")]

pub mod prefixes;

use crossbeam_queue::ArrayQueue;
use kvpager_core::block_pool::{BlockPool, Magazine, PoolConfig, Quota, Reservation};
use kvpager_core::{AccountId, BlockHandle, BlockId};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Something that hands out batches of blocks and takes them back.
pub trait Peer: Send + Sync + 'static {
    /// What each thread has of its own.
    type Local;
    /// Makes it.
    fn local(&self, thread: usize) -> Self::Local;
    /// Fills `out`. The benchmarks never ask for more than there is.
    fn allocate(&self, local: &mut Self::Local, out: &mut [BlockHandle]);
    /// Takes a batch back.
    fn release(&self, local: &mut Self::Local, blocks: &[BlockHandle]);
}

/// Whether threads are charged to one tenant or to one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenants {
    /// All threads are one tenant.
    Same,
    /// Each thread is its own, with its share guaranteed.
    Different,
}

/// A pool, and the account of each thread.
#[derive(Debug)]
pub struct Pool {
    pool: Arc<BlockPool>,
    accounts: Vec<AccountId>,
}

impl Pool {
    /// A pool for some threads.
    #[must_use]
    pub fn new(num_blocks: u32, threads: u32, tenants: Tenants) -> Self {
        let config = PoolConfig { num_blocks, ..PoolConfig::default() };
        let pool = BlockPool::new(config).expect("the configuration is in range");
        let share = num_blocks / threads;
        let account = |quota| pool.add_account(quota).expect("the shares add up to the capacity at most");
        let accounts = match tenants {
            Tenants::Same => vec![account(Quota { guaranteed: 0, limit: num_blocks }); threads as usize],
            Tenants::Different => {
                (0..threads).map(|_| account(Quota { guaranteed: share, limit: share })).collect()
            }
        };
        Self { pool, accounts }
    }

    /// Leaves a share of the blocks free, at random places.
    pub fn fragment(&self, percent: u32) {
        let mut all = vec![blank(); self.pool.num_blocks() as usize];
        self.pool.allocate(self.accounts[0], &mut all).expect("the pool is empty");
        let mut random = 0x2545_f491_4f6c_dd1du64;
        all.retain(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % 100 < u64::from(percent)
        });
        self.pool.release(&all).expect("each is held once");
    }

    /// Blocks that are free now.
    #[must_use]
    pub fn num_free(&self) -> u64 {
        self.pool.stats().free
    }
}

const EXPECT: &str = "there is room and every block is held once";

/// A handle of no block.
#[must_use]
pub const fn blank() -> BlockHandle {
    BlockHandle::new(0, BlockId(0))
}

/// Capacity and blocks in one call.
#[derive(Debug)]
pub struct Direct(pub Pool);

impl Peer for Direct {
    type Local = AccountId;

    fn local(&self, thread: usize) -> AccountId {
        self.0.accounts[thread]
    }

    #[inline]
    fn allocate(&self, local: &mut AccountId, out: &mut [BlockHandle]) {
        self.0.pool.allocate(*local, out).expect(EXPECT);
    }

    #[inline]
    fn release(&self, _: &mut AccountId, blocks: &[BlockHandle]) {
        self.0.pool.release(blocks).expect(EXPECT);
    }
}

/// Blocks drawn from a reservation and put back into it.
#[derive(Debug)]
pub struct Reserved(pub Pool, pub u32);

impl Peer for Reserved {
    type Local = Reservation;

    fn local(&self, thread: usize) -> Reservation {
        self.0.pool.reserve(self.0.accounts[thread], self.1).expect(EXPECT)
    }

    #[inline]
    fn allocate(&self, local: &mut Reservation, out: &mut [BlockHandle]) {
        local.allocate(out).expect(EXPECT);
    }

    #[inline]
    fn release(&self, local: &mut Reservation, blocks: &[BlockHandle]) {
        local.put_back(blocks).expect(EXPECT);
    }
}

/// Blocks drawn from a reservation of 1,024, made anew when it is used up, and released to the pool.
#[derive(Debug)]
pub struct Drawn(pub Pool);

impl Peer for Drawn {
    type Local = (AccountId, Reservation);

    fn local(&self, thread: usize) -> Self::Local {
        let account = self.0.accounts[thread];
        (account, self.0.pool.reserve(account, 1024).expect(EXPECT))
    }

    #[inline]
    fn allocate(&self, local: &mut Self::Local, out: &mut [BlockHandle]) {
        if (local.1.num_blocks() as usize) < out.len() {
            local.1.grow(1024 - local.1.num_blocks()).expect(EXPECT);
        }
        local.1.allocate(out).expect(EXPECT);
    }

    #[inline]
    fn release(&self, _: &mut Self::Local, blocks: &[BlockHandle]) {
        self.0.pool.release(blocks).expect(EXPECT);
    }
}

/// Direct, with every release going through the quarantine of a step; a step is 64 operations.
#[derive(Debug)]
pub struct Quarantined(pub Pool);

/// Operations of a step.
const STEP: u32 = 64;

impl Peer for Quarantined {
    type Local = (AccountId, kvpager_core::block_pool::StepEpoch, u32);

    fn local(&self, thread: usize) -> Self::Local {
        (self.0.accounts[thread], self.0.pool.open_step().expect(EXPECT), 0)
    }

    #[inline]
    fn allocate(&self, local: &mut Self::Local, out: &mut [BlockHandle]) {
        self.0.pool.allocate(local.0, out).expect(EXPECT);
    }

    #[inline]
    fn release(&self, local: &mut Self::Local, blocks: &[BlockHandle]) {
        self.0.pool.release(blocks).expect(EXPECT);
        local.2 += 1;
        if local.2 == STEP {
            self.0.pool.close_step(local.1).expect(EXPECT);
            local.1 = self.0.pool.open_step().expect(EXPECT);
            local.2 = 0;
        }
    }
}

/// Each thread with a magazine; batches of one only.
#[derive(Debug)]
pub struct Magazines(pub Pool);

impl Peer for Magazines {
    type Local = Magazine;

    fn local(&self, thread: usize) -> Magazine {
        Magazine::new(&self.0.pool, self.0.accounts[thread]).expect(EXPECT)
    }

    #[inline]
    fn allocate(&self, local: &mut Magazine, out: &mut [BlockHandle]) {
        for block in out {
            *block = local.allocate().expect(EXPECT);
        }
    }

    #[inline]
    fn release(&self, local: &mut Magazine, blocks: &[BlockHandle]) {
        for block in blocks {
            local.release(*block).expect(EXPECT);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stack of handles under a mutex.
#[derive(Debug)]
pub struct MutexVec(Mutex<Vec<BlockHandle>>);

impl MutexVec {
    /// All blocks free.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self(Mutex::new((0..num_blocks).map(|id| BlockHandle::new(0, BlockId(id))).collect()))
    }
}

impl Peer for MutexVec {
    type Local = ();

    fn local(&self, _: usize) {}

    #[inline]
    fn allocate(&self, (): &mut (), out: &mut [BlockHandle]) {
        let mut free = locked(&self.0);
        let rest = free.len().checked_sub(out.len()).expect(EXPECT);
        out.copy_from_slice(&free[rest..]);
        free.truncate(rest);
    }

    #[inline]
    fn release(&self, (): &mut (), blocks: &[BlockHandle]) {
        locked(&self.0).extend_from_slice(blocks);
    }
}

/// A queue of handles under a mutex.
#[derive(Debug)]
pub struct MutexFifo(Mutex<VecDeque<BlockHandle>>);

impl MutexFifo {
    /// All blocks free.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        Self(Mutex::new((0..num_blocks).map(|id| BlockHandle::new(0, BlockId(id))).collect()))
    }
}

impl Peer for MutexFifo {
    type Local = ();

    fn local(&self, _: usize) {}

    #[inline]
    fn allocate(&self, (): &mut (), out: &mut [BlockHandle]) {
        let mut free = locked(&self.0);
        assert!(free.len() >= out.len(), "{EXPECT}");
        let count = out.len();
        for (slot, block) in out.iter_mut().zip(free.drain(..count)) {
            *slot = block;
        }
    }

    #[inline]
    fn release(&self, (): &mut (), blocks: &[BlockHandle]) {
        locked(&self.0).extend(blocks);
    }
}

/// Crossbeam's bounded queue; a batch is as many pops, so it is not all or nothing.
#[derive(Debug)]
pub struct Array(ArrayQueue<BlockHandle>);

impl Array {
    /// All blocks free.
    #[must_use]
    pub fn new(num_blocks: u32) -> Self {
        let queue = ArrayQueue::new(num_blocks as usize);
        for id in 0..num_blocks {
            queue.push(BlockHandle::new(0, BlockId(id))).expect("the queue is as long as the ids");
        }
        Self(queue)
    }
}

impl Peer for Array {
    type Local = ();

    fn local(&self, _: usize) {}

    #[inline]
    fn allocate(&self, (): &mut (), out: &mut [BlockHandle]) {
        for slot in out {
            *slot = self.0.pop().expect(EXPECT);
        }
    }

    #[inline]
    fn release(&self, (): &mut (), blocks: &[BlockHandle]) {
        for block in blocks {
            self.0.push(*block).expect(EXPECT);
        }
    }
}

/// Batches that a thread holds at a time.
pub const HELD: usize = 8;

/// A thread at work: it holds [`HELD`] batches, releases the oldest and takes a new one.
#[derive(Debug)]
pub struct Worker<'a, P: Peer> {
    peer: &'a P,
    local: P::Local,
    held: Vec<BlockHandle>,
    batch: usize,
    at: usize,
}

impl<'a, P: Peer> Worker<'a, P> {
    /// A thread with its batches.
    #[must_use]
    pub fn new(peer: &'a P, thread: usize, batch: usize) -> Self {
        let mut local = peer.local(thread);
        let mut held = vec![blank(); batch * HELD];
        for out in held.chunks_mut(batch) {
            peer.allocate(&mut local, out);
        }
        Self { peer, local, held, batch, at: 0 }
    }

    /// One operation: releases a batch and allocates one.
    #[inline]
    pub fn operate(&mut self) {
        let slots = &mut self.held[self.at..self.at + self.batch];
        self.peer.release(&mut self.local, slots);
        self.peer.allocate(&mut self.local, slots);
        self.at += self.batch;
        if self.at == self.held.len() {
            self.at = 0;
        }
    }
}

impl<P: Peer> Drop for Worker<'_, P> {
    fn drop(&mut self) {
        for batch in self.held.chunks(self.batch) {
            self.peer.release(&mut self.local, batch);
        }
    }
}
