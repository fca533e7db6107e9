//! The pool against a naive model: whatever is done, both say the same, and the invariants hold after every step.
//! `PROPTEST_CASES` sets the number of cases.

use crate::support::{Pool, blank};
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota, Reservation, StepEpoch, faults};
use kvpager_core::{AccountId, BlockHandle, Error};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::{BTreeMap, BTreeSet};

const BLOCKS: u32 = 60;
const ACCOUNTS: usize = 3;

#[derive(Clone, Debug)]
enum Operation {
    Allocate(usize, usize),
    Release(Vec<Index>),
    ReleaseStale(Index, Vec<Index>),
    Retain(Vec<Index>),
    Reserve(usize, u32),
    Draw(Index, usize),
    PutBack(Index, Vec<Index>),
    Grow(Index, u32),
    Shrink(Index, u32),
    Cancel(Index),
    Open,
    Close(Index),
    Index(Vec<Index>),
    Unhold(usize, u32),
    Hold(usize, u32),
    Evict(Vec<Index>),
    SetQuota(usize, u32, u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation as O;
    let some = || prop::collection::vec(any::<Index>(), 1..30);
    let account = || 0..ACCOUNTS;
    prop_oneof![
        8 => (account(), 1..40usize).prop_map(|(a, n)| O::Allocate(a, n)),
        6 => some().prop_map(O::Release),
        1 => (any::<Index>(), some()).prop_map(|(old, rest)| O::ReleaseStale(old, rest)),
        3 => some().prop_map(O::Retain),
        3 => (account(), 1..30u32).prop_map(|(a, n)| O::Reserve(a, n)),
        4 => (any::<Index>(), 1..20usize).prop_map(|(r, n)| O::Draw(r, n)),
        2 => (any::<Index>(), some()).prop_map(|(r, blocks)| O::PutBack(r, blocks)),
        1 => (any::<Index>(), 1..20u32).prop_map(|(r, n)| O::Grow(r, n)),
        1 => (any::<Index>(), 1..20u32).prop_map(|(r, n)| O::Shrink(r, n)),
        1 => any::<Index>().prop_map(O::Cancel),
        2 => Just(O::Open),
        3 => any::<Index>().prop_map(O::Close),
        2 => some().prop_map(O::Index),
        2 => (account(), 1..20u32).prop_map(|(a, n)| O::Unhold(a, n)),
        2 => (account(), 1..20u32).prop_map(|(a, n)| O::Hold(a, n)),
        2 => some().prop_map(O::Evict),
        1 => (account(), 0..BLOCKS, 0..BLOCKS + 2).prop_map(|(a, g, l)| O::SetQuota(a, g, l)),
    ]
}

/// What an error asks of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    Blocks,
    Quota,
    Reclaim,
    Handle,
    Argument,
    State,
}

fn refusal(error: &Error) -> Refusal {
    match error {
        Error::OutOfBlocks { .. } => Refusal::Blocks,
        Error::OverQuota { .. } => Refusal::Quota,
        Error::NeedsReclaim { .. } => Refusal::Reclaim,
        Error::InvalidHandle { .. } => Refusal::Handle,
        Error::WrongState(_) => Refusal::State,
        _ => Refusal::Argument,
    }
}

type Outcome = Result<(), Refusal>;

#[derive(Clone, Copy, Default)]
struct Account {
    guaranteed: u32,
    limit: u32,
    used: u32,
    pinned: u32,
    cached: u32,
}

impl Account {
    fn footprint(self, used: u32) -> u32 {
        self.guaranteed.max(used)
    }
}

struct Promise {
    account: usize,
    num_blocks: u32,
    backed: u32,
}

/// The pool as a page of arithmetic.
#[derive(Default)]
struct Model {
    accounts: [Account; ACCOUNTS],
    held: BTreeMap<u64, (usize, u32)>,
    indexed: BTreeMap<u64, usize>,
    promises: Vec<Promise>,
    /// Account, blocks that were held, capacity of pins, and the epoch that they wait for.
    waiting: Vec<(usize, u32, u32, u64)>,
    opened: u64,
    open: BTreeSet<u64>,
}

impl Model {
    fn free(&self) -> u32 {
        let backed: u32 = self.promises.iter().map(|promise| promise.backed).sum();
        let waiting: u32 = self.waiting.iter().map(|(_, blocks, _, _)| blocks).sum();
        BLOCKS - (self.held.len() + self.indexed.len()) as u32 - waiting - backed
    }

    fn take(&mut self, account: usize, count: u32, free: u32) -> Outcome {
        let of = self.accounts[account];
        let uncommitted = BLOCKS - self.accounts.iter().map(|a| a.footprint(a.used)).sum::<u32>();
        if of.used + count > of.limit {
            return Err(Refusal::Quota);
        }
        if of.footprint(of.used + count) - of.footprint(of.used) > uncommitted {
            return Err(Refusal::Blocks);
        }
        if free > self.free() {
            return Err(Refusal::Reclaim);
        }
        self.accounts[account].used += count;
        Ok(())
    }

    fn settle(&mut self) {
        let closed = self.open.first().map_or(self.opened, |first| first - 1);
        for (account, blocks, pins, epoch) in std::mem::take(&mut self.waiting) {
            if epoch > closed {
                self.waiting.push((account, blocks, pins, epoch));
                continue;
            }
            self.accounts[account].used -= blocks + pins;
            self.accounts[account].cached += pins;
        }
    }

    fn wait(&mut self, account: usize, blocks: u32, pins: u32) {
        let epoch = if self.open.is_empty() { 0 } else { self.opened };
        self.waiting.push((account, blocks, pins, epoch));
        self.settle();
    }

    fn release(&mut self, blocks: &[BlockHandle]) -> Outcome {
        let mut after = self.held.clone();
        let mut gone = Vec::new();
        for block in blocks {
            let (account, references) = after.get_mut(&block.to_bits()).ok_or(Refusal::Handle)?;
            *references -= 1;
            if *references == 0 {
                gone.push(*account);
                after.remove(&block.to_bits());
            }
        }
        self.held = after;
        gone.into_iter().for_each(|account| self.wait(account, 1, 0));
        Ok(())
    }

    /// Whether all are held by one reference, each named once, and of one account if one is given.
    fn exclusive(&self, blocks: &[BlockHandle], account: Option<usize>) -> bool {
        let names: BTreeSet<u64> = blocks.iter().map(|block| block.to_bits()).collect();
        names.len() == blocks.len()
            && names.iter().all(|bits| {
                self.held.get(bits).is_some_and(|(of, references)| {
                    *references == 1 && account.is_none_or(|account| account == *of)
                })
            })
    }
}

struct Pair {
    pool: Pool<{ faults::NONE }>,
    model: Model,
    reservations: Vec<Reservation>,
    stale: Vec<BlockHandle>,
}

fn pick(indices: &[Index], from: impl Iterator<Item = u64>) -> Vec<BlockHandle> {
    let all: Vec<u64> = from.collect();
    if all.is_empty() {
        return Vec::new();
    }
    indices.iter().map(|index| BlockHandle::from_bits(*index.get(&all))).collect()
}

fn id(account: usize) -> AccountId {
    AccountId(account as u32)
}

impl Pair {
    fn new() -> Self {
        let config = PoolConfig { num_blocks: BLOCKS, max_accounts: 3, max_open_steps: 3 };
        let pool = BlockPool::new(config).unwrap();
        let mut model = Model::default();
        for (account, guaranteed) in [0, 10, 25].into_iter().enumerate() {
            let quota = Quota { guaranteed, limit: BLOCKS - account as u32 * 10 };
            pool.add_account(quota).unwrap();
            model.accounts[account] = Account { guaranteed, limit: quota.limit, ..Account::default() };
        }
        Self { pool, model, reservations: Vec::new(), stale: Vec::new() }
    }

    fn hand_out(&mut self, account: usize, blocks: &[BlockHandle]) {
        for block in blocks {
            let same = |bits: &u64| BlockHandle::from_bits(*bits).id() == block.id();
            assert!(!self.model.held.keys().chain(self.model.indexed.keys()).any(same), "handed out twice");
            self.model.held.insert(block.to_bits(), (account, 1));
        }
    }

    fn held(&self, indices: &[Index]) -> Vec<BlockHandle> {
        pick(indices, self.model.held.keys().copied())
    }

    /// Distinct held blocks.
    fn distinct(&self, indices: &[Index]) -> Vec<BlockHandle> {
        let names: BTreeSet<u64> = self.held(indices).iter().map(|block| block.to_bits()).collect();
        names.into_iter().map(BlockHandle::from_bits).collect()
    }

    fn apply(&mut self, operation: Operation) {
        let (expected, got) = match operation {
            Operation::Allocate(account, count) => self.allocate(account, count),
            Operation::Release(which) => self.release(self.held(&which)),
            Operation::ReleaseStale(old, rest) => {
                let old = pick(&[old], self.stale.iter().map(|block| block.to_bits()));
                let blocks = self.held(&rest).into_iter().chain(old).collect();
                self.release(blocks)
            }
            Operation::Retain(which) => self.retain(&which),
            Operation::Open => self.open(),
            Operation::Close(which) => self.close(which),
            Operation::Index(which) => self.index(&which),
            Operation::Unhold(account, count) => self.unhold(account, count),
            Operation::Hold(account, count) => self.hold(account, count),
            Operation::Evict(which) => self.evict(&which),
            Operation::SetQuota(account, guaranteed, limit) => self.set_quota(account, guaranteed, limit),
            Operation::Reserve(account, count) => self.reserve(account, count),
            other => self.change_reservation(other),
        };
        assert_eq!(got.as_ref().map_err(refusal).copied(), expected, "{got:?}");
    }

    fn allocate(&mut self, account: usize, count: usize) -> (Outcome, Result<(), Error>) {
        let expected = self.model.take(account, count as u32, count as u32);
        let mut out = blank(count);
        let got = self.pool.allocate(id(account), &mut out);
        if got.is_ok() {
            self.hand_out(account, &out);
        }
        (expected, got)
    }

    fn release(&mut self, blocks: Vec<BlockHandle>) -> (Outcome, Result<(), Error>) {
        let expected = self.model.release(&blocks);
        let got = self.pool.release(&blocks);
        self.stale.extend(blocks.iter().filter(|block| !self.model.held.contains_key(&block.to_bits())));
        (expected, got)
    }

    fn retain(&mut self, which: &[Index]) -> (Outcome, Result<(), Error>) {
        let blocks = self.held(which);
        for block in &blocks {
            self.model.held.get_mut(&block.to_bits()).unwrap().1 += 1;
        }
        (Ok(()), self.pool.retain(&blocks))
    }

    fn open(&mut self) -> (Outcome, Result<(), Error>) {
        let closed = self.model.open.first().map_or(self.model.opened, |first| first - 1);
        let expected = if self.model.opened - closed >= 3 { Err(Refusal::State) } else { Ok(()) };
        let got = self.pool.open_step();
        if let Ok(epoch) = got {
            self.model.opened += 1;
            assert_eq!(epoch.number(), self.model.opened);
            self.model.open.insert(epoch.number());
        }
        (expected, got.map(|_| ()))
    }

    fn close(&mut self, which: Index) -> (Outcome, Result<(), Error>) {
        let open: Vec<u64> = self.model.open.iter().copied().collect();
        if open.is_empty() {
            let closed = StepEpoch::from_number(self.model.opened);
            return (Err(Refusal::State), self.pool.close_step(closed));
        }
        let epoch = *which.get(&open);
        self.model.open.remove(&epoch);
        let got = self.pool.close_step(StepEpoch::from_number(epoch));
        self.model.settle();
        (Ok(()), got)
    }

    fn index(&mut self, which: &[Index]) -> (Outcome, Result<(), Error>) {
        let blocks = self.held(which);
        let good = self.model.exclusive(&blocks, None);
        for block in blocks.iter().filter(|_| good) {
            let (account, _) = self.model.held.remove(&block.to_bits()).unwrap();
            self.model.indexed.insert(block.to_bits(), account);
            self.model.accounts[account].pinned += 1;
        }
        (if good { Ok(()) } else { Err(Refusal::Handle) }, self.pool.index_blocks(&blocks))
    }

    fn unhold(&mut self, account: usize, count: u32) -> (Outcome, Result<(), Error>) {
        let count = count.min(self.model.accounts[account].pinned);
        self.model.accounts[account].pinned -= count;
        self.model.wait(account, 0, count);
        (Ok(()), self.pool.unhold_cached(id(account), count).map(|_| ()))
    }

    fn hold(&mut self, account: usize, count: u32) -> (Outcome, Result<(), Error>) {
        let count = count.min(self.model.accounts[account].cached);
        let expected = self.model.take(account, count, 0);
        if expected.is_ok() {
            self.model.accounts[account].cached -= count;
            self.model.accounts[account].pinned += count;
        }
        (expected, self.pool.hold_cached(id(account), count))
    }

    /// Evicts what is unpinned, and tries a block that is not the index's after it.
    fn evict(&mut self, which: &[Index]) -> (Outcome, Result<(), Error>) {
        let names: BTreeSet<u64> =
            pick(which, self.model.indexed.keys().copied()).iter().map(|block| block.to_bits()).collect();
        let mut cached = self.model.accounts.map(|account| account.cached);
        let mut blocks: Vec<_> = names.into_iter().map(BlockHandle::from_bits).collect();
        blocks.retain(|block| {
            let account = self.model.indexed[&block.to_bits()];
            let unpinned = cached[account] > 0;
            cached[account] -= u32::from(unpinned);
            unpinned
        });
        if which.len().is_multiple_of(3)
            && let Some(held) = self.model.held.keys().next()
        {
            let bad: Vec<_> = blocks.into_iter().chain([BlockHandle::from_bits(*held)]).collect();
            return (Err(Refusal::Handle), self.pool.evict(&bad));
        }
        for block in &blocks {
            let account = self.model.indexed.remove(&block.to_bits()).unwrap();
            self.model.accounts[account].cached -= 1;
        }
        (Ok(()), self.pool.evict(&blocks))
    }

    fn set_quota(&mut self, account: usize, guaranteed: u32, limit: u32) -> (Outcome, Result<(), Error>) {
        let others: u32 = (0..ACCOUNTS)
            .filter(|other| *other != account)
            .map(|other| self.model.accounts[other].footprint(self.model.accounts[other].used))
            .sum();
        let of = &mut self.model.accounts[account];
        let fits = others + guaranteed.max(of.used) <= BLOCKS;
        let good = limit > 0 && limit <= BLOCKS && guaranteed <= limit && fits;
        if good {
            (of.guaranteed, of.limit) = (guaranteed, limit);
        }
        let expected = if good { Ok(()) } else { Err(Refusal::Argument) };
        (expected, self.pool.set_quota(id(account), Quota { guaranteed, limit }))
    }

    fn reserve(&mut self, account: usize, count: u32) -> (Outcome, Result<(), Error>) {
        let expected = self.model.take(account, count, 0);
        let got = self.pool.reserve(id(account), count).map(|reservation| {
            self.reservations.push(reservation);
            self.model.promises.push(Promise { account, num_blocks: count, backed: 0 });
        });
        (expected, got)
    }

    fn change_reservation(&mut self, operation: Operation) -> (Outcome, Result<(), Error>) {
        use Operation as O;
        let (O::Draw(which, _)
        | O::PutBack(which, _)
        | O::Grow(which, _)
        | O::Shrink(which, _)
        | O::Cancel(which)) = &operation
        else {
            return (Ok(()), Ok(()));
        };
        if self.reservations.is_empty() {
            return (Ok(()), Ok(()));
        }
        let at = which.index(self.reservations.len());
        match operation {
            O::Draw(_, count) => self.draw(at, count),
            O::PutBack(_, blocks) => self.put_back(at, &self.distinct(&blocks)),
            O::Grow(_, count) => {
                let expected = self.model.take(self.model.promises[at].account, count, 0);
                self.model.promises[at].num_blocks += if expected.is_ok() { count } else { 0 };
                (expected, self.reservations[at].grow(count))
            }
            O::Shrink(_, count) => self.shrink(at, count),
            _ => {
                let all = self.model.promises[at].num_blocks;
                let outcome = self.shrink(at, all);
                self.model.promises.swap_remove(at);
                self.reservations.swap_remove(at);
                outcome
            }
        }
    }

    fn draw(&mut self, at: usize, count: usize) -> (Outcome, Result<(), Error>) {
        let (free, count32) = (self.model.free(), count as u32);
        let promise = &mut self.model.promises[at];
        let expected = if count32 > promise.num_blocks {
            Err(Refusal::Argument)
        } else if count32 - promise.backed.min(count32) > free {
            Err(Refusal::Reclaim)
        } else {
            promise.num_blocks -= count32;
            promise.backed -= promise.backed.min(count32);
            Ok(())
        };
        let account = promise.account;
        let mut out = blank(count);
        let got = self.reservations[at].allocate(&mut out);
        if got.is_ok() {
            self.hand_out(account, &out);
        }
        (expected, got)
    }

    fn put_back(&mut self, at: usize, blocks: &[BlockHandle]) -> (Outcome, Result<(), Error>) {
        let account = self.model.promises[at].account;
        let expected = if !self.model.open.is_empty() {
            Err(Refusal::State)
        } else if !self.model.exclusive(blocks, Some(account)) {
            Err(Refusal::Handle)
        } else {
            self.model.held.retain(|bits, _| !blocks.contains(&BlockHandle::from_bits(*bits)));
            self.model.promises[at].num_blocks += blocks.len() as u32;
            self.model.promises[at].backed += blocks.len() as u32;
            Ok(())
        };
        (expected, self.reservations[at].put_back(blocks))
    }

    fn shrink(&mut self, at: usize, count: u32) -> (Outcome, Result<(), Error>) {
        let promise = &mut self.model.promises[at];
        let expected = if count > promise.num_blocks {
            Err(Refusal::Argument)
        } else {
            promise.num_blocks -= count;
            promise.backed = promise.backed.min(promise.num_blocks);
            self.model.accounts[promise.account].used -= count;
            Ok(())
        };
        (expected, self.reservations[at].shrink(count))
    }

    fn compare(&self) {
        self.pool.check_invariants().unwrap();
        let (stats, model) = (self.pool.stats(), &self.model);
        assert_eq!(
            stats.free,
            u64::from(model.free() + model.promises.iter().map(|p| p.backed).sum::<u32>())
        );
        assert_eq!(stats.cached, model.accounts.iter().map(|account| u64::from(account.cached)).sum::<u64>());
        for (account, of) in model.accounts.iter().enumerate() {
            let got = self.pool.account_stats(id(account)).unwrap();
            let reserved: u32 =
                model.promises.iter().filter(|p| p.account == account).map(|p| p.num_blocks).sum();
            let waiting: u32 = model.waiting.iter().filter(|w| w.0 == account).map(|w| w.1 + w.2).sum();
            let expected =
                [of.used, reserved, waiting, of.cached, of.used - reserved - waiting].map(u64::from);
            assert_eq!([got.committed, got.reserved, got.quarantined, got.cached, got.held], expected);
        }
        for (bits, (_, references)) in &model.held {
            assert_eq!(self.pool.is_exclusive(BlockHandle::from_bits(*bits)).unwrap(), *references == 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_what_a_naive_model_does(operations in prop::collection::vec(operation(), 1..80)) {
        let mut pair = Pair::new();
        for operation in operations {
            pair.apply(operation);
            pair.compare();
        }
    }
}
