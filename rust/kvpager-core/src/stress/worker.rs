//! One worker: what it has, and how it does an operation.

use super::operation::Op;
use super::report::Violation;
use super::world::{Tally, World};
use crate::block_pool::{Magazine, Quota, Reservation, StepEpoch};
use crate::error::Error;
use crate::ids::{AccountId, BlockHandle, BlockId};
use std::time::Duration;

/// Batches of a worker.
pub(super) const NUM_BATCHES: usize = 16;
/// Reservations of a worker.
pub(super) const NUM_RESERVATIONS: usize = 4;
/// Steps that a worker has open at most.
pub(super) const NUM_STEPS: usize = 2;
/// Most blocks of a batch.
const MAX_BATCH: usize = 64;
/// Stale handles that a worker remembers.
pub(super) const NUM_STALE: usize = 16;

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    /// Held by references; this worker has one of each block.
    Held,
    /// In the index, its capacity held.
    Pinned,
    /// In the index, its capacity given back, in this epoch if a step was open.
    Cached(Option<StepEpoch>),
}

/// Up to 64 blocks of one account that move together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    pub(super) place: Place,
    pub(super) tenant: u8,
    len: u8,
    blocks: [BlockHandle; MAX_BATCH],
}

impl Batch {
    const fn none() -> Self {
        Self {
            place: Place::Nowhere,
            tenant: 0,
            len: 0,
            blocks: [BlockHandle::new(0, BlockId(0)); MAX_BATCH],
        }
    }

    pub(super) fn blocks(&self) -> &[BlockHandle] {
        &self.blocks[..self.len as usize]
    }
}

/// What came of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The pool refused it, as it may.
    Refused,
    /// There was nothing to do it with.
    Skipped,
}

pub(super) type Step = Result<Outcome, Violation>;

pub(super) struct Worker<'w, const F: u8> {
    pub(super) world: &'w World<F>,
    pub(super) me: usize,
    pub(super) batches: [Batch; NUM_BATCHES],
    pub(super) reservations: [Option<(Reservation<F>, u8)>; NUM_RESERVATIONS],
    pub(super) steps: [Option<StepEpoch>; NUM_STEPS],
    pub(super) magazine: Option<(Magazine<F>, u8)>,
    /// Handles that are stale for certain, the oldest overwritten first.
    pub(super) stale: [Option<BlockHandle>; NUM_STALE],
    num_stale: usize,
    /// Of the last operation: time spent in calls of the pool.
    pub(super) spent: Duration,
    /// Whether the last operation was refused.
    pub(super) was_refused: bool,
}

/// Runs a call of the pool and adds its time.
macro_rules! timed {
    ($worker:expr, $call:expr) => {{
        let begin = std::time::Instant::now();
        let result = $call;
        $worker.spent += begin.elapsed();
        result
    }};
}
pub(super) use timed;

impl<'w, const F: u8> Worker<'w, F> {
    pub(super) fn new(world: &'w World<F>, me: usize) -> Self {
        Self {
            world,
            me,
            batches: [Batch::none(); NUM_BATCHES],
            reservations: [const { None }; NUM_RESERVATIONS],
            steps: [None; NUM_STEPS],
            magazine: None,
            stale: [None; NUM_STALE],
            num_stale: 0,
            spent: Duration::ZERO,
            was_refused: false,
        }
    }

    /// Does an operation.
    pub(super) fn execute(&mut self, op: Op) -> Step {
        self.spent = Duration::ZERO;
        let outcome = self.dispatch(op)?;
        self.was_refused = outcome == Outcome::Refused;
        Ok(outcome)
    }

    fn dispatch(&mut self, op: Op) -> Step {
        match op {
            Op::Allocate { batch, tenant, count } => self.allocate(batch, tenant, count),
            Op::Retain { batch, copy } => self.retain(batch, copy),
            Op::Release { batch } => self.release(batch),
            Op::Send { batch, to } => self.send(batch, to),
            Op::Receive { batch } => self.receive(batch),
            Op::CopyOnWrite { batch } => self.copy_on_write(batch),
            Op::Reserve { reservation, tenant, count } => self.reserve(reservation, tenant, count),
            Op::Draw { reservation, batch, count } => self.draw(reservation, batch, count),
            Op::PutBack { reservation, batch } => self.put_back(reservation, batch),
            Op::Grow { reservation, count } => self.grow(reservation, count),
            Op::Shrink { reservation, count } => self.shrink(reservation, count),
            Op::Cancel { reservation } => self.cancel(reservation),
            Op::OpenStep { step } => self.open_step(step),
            Op::CloseStep { step } => self.close_step(step),
            Op::SetQuota { tenant, guaranteed, limit } => self.set_quota(tenant, Quota { guaranteed, limit }),
            Op::OpenMagazine { tenant } => self.open_magazine(tenant),
            Op::MagazineAllocate { batch } => self.magazine_allocate(batch),
            Op::MagazineRelease { batch } => self.magazine_release(batch),
            Op::CloseMagazine => self.close_magazine(),
            Op::Index { batch } => self.index(batch),
            Op::Unpin { batch } => self.unpin(batch),
            Op::Pin { batch } => self.pin(batch),
            Op::Evict { batch } => self.evict(batch),
            Op::Trade { batch, cached } => self.trade(batch, cached),
            Op::Probe { probe, batch } => self.probe(probe, batch),
        }
    }

    pub(super) fn tally(&self) -> Tally {
        let cached = |batch: &&Batch| matches!(batch.place, Place::Cached(_));
        Tally {
            reserved: self.reservations.iter().flatten().map(|(held, _)| u64::from(held.num_blocks())).sum(),
            cached: self.batches.iter().filter(cached).map(|batch| u64::from(batch.len)).sum(),
            stranded: self.magazine.iter().map(|(magazine, _)| magazine.num_blocks() as u64).sum(),
        }
    }

    /// A batch in a place, if it is there.
    pub(super) fn batch(&self, at: u8, place: Place) -> Option<Batch> {
        Some(self.batches[at as usize]).filter(|batch| batch.place == place && batch.len > 0)
    }

    fn account(tenant: u8) -> AccountId {
        AccountId(tenant.into())
    }

    fn newest_step(&self) -> u64 {
        self.steps.iter().flatten().map(|epoch| epoch.number()).max().unwrap_or(0)
    }

    pub(super) fn remember_stale(&mut self, block: BlockHandle) {
        self.stale[self.num_stale % NUM_STALE] = Some(block);
        self.num_stale += 1;
    }

    /// An error where the call may not fail.
    pub(super) fn must(what: &str, result: Result<(), Error>) -> Result<(), Violation> {
        result.map_err(|error| Violation::new(format!("{what} failed: {error}")))
    }

    /// Fills an empty place with new blocks by `take`. `Err(Ok(error))` of it is a refusal.
    fn fill(&mut self, at: u8, tenant: u8, blocks: &[BlockHandle]) -> Step {
        let batch = &mut self.batches[at as usize];
        batch.blocks[..blocks.len()].copy_from_slice(blocks);
        (batch.len, batch.tenant, batch.place) = (blocks.len() as u8, tenant, Place::Held);
        self.world.shadow.hand_out(self.me, blocks)?;
        Ok(Outcome::Done)
    }

    fn allocate(&mut self, at: u8, tenant: u8, count: u8) -> Step {
        if self.batches[at as usize].place != Place::Nowhere {
            return Ok(Outcome::Skipped);
        }
        let mut blocks = [BlockHandle::new(0, BlockId(0)); MAX_BATCH];
        let out = &mut blocks[..count as usize];
        let asked = self.world.asks(tenant, count.into());
        match timed!(self, self.world.pool.allocate(Self::account(tenant), out)) {
            Ok(()) => self.fill(at, tenant, &blocks[..count as usize]),
            Err(error) => {
                self.world.check_refusal(asked, &error)?;
                Ok(Outcome::Refused)
            }
        }
    }

    fn retain(&mut self, at: u8, copy: u8) -> Step {
        let (Some(batch), Place::Nowhere) = (self.batch(at, Place::Held), self.batches[copy as usize].place)
        else {
            return Ok(Outcome::Skipped);
        };
        let done = timed!(self, self.world.pool.retain(batch.blocks()));
        Self::must("retaining held blocks", done)?;
        self.world.shadow.retained(batch.blocks());
        self.batches[copy as usize] = batch;
        Ok(Outcome::Done)
    }

    pub(super) fn release(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        self.give_up(at, &batch);
        let done = timed!(self, self.world.pool.release(batch.blocks()));
        Self::must("releasing held blocks", done)?;
        self.world.gave(batch.tenant, batch.len.into());
        Ok(Outcome::Done)
    }

    /// Counts a batch down, just before the pool is told.
    fn give_up(&mut self, at: u8, batch: &Batch) {
        if self.world.shadow.never_shared(batch.blocks()) {
            self.remember_stale(batch.blocks[0]);
        }
        self.world.shadow.giving_up(batch.blocks(), self.newest_step());
        self.batches[at as usize].place = Place::Nowhere;
    }

    fn send(&mut self, at: u8, to: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        let mailbox = &self.world.mailboxes[to as usize % self.world.mailboxes.len()];
        if mailbox.is_full() {
            return Ok(Outcome::Skipped);
        }
        let done = timed!(self, self.world.pool.retain(batch.blocks()));
        Self::must("retaining held blocks", done)?;
        self.world.shadow.retained(batch.blocks());
        if let Err(batch) = mailbox.push(batch) {
            self.world.shadow.giving_up(batch.blocks(), self.newest_step());
            let done = timed!(self, self.world.pool.release(batch.blocks()));
            Self::must("releasing blocks that were just retained", done)?;
        }
        Ok(Outcome::Done)
    }

    pub(super) fn receive(&mut self, at: u8) -> Step {
        if self.batches[at as usize].place != Place::Nowhere {
            return Ok(Outcome::Skipped);
        }
        let Some(batch) = self.world.mailboxes[self.me].pop() else { return Ok(Outcome::Skipped) };
        self.batches[at as usize] = batch;
        Ok(Outcome::Done)
    }

    fn copy_on_write(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held) else { return Ok(Outcome::Skipped) };
        let first = batch.blocks[0];
        match timed!(self, self.world.pool.is_exclusive(first)) {
            Ok(true) if self.world.shadow.references(first) == 1 => return Ok(Outcome::Done),
            Ok(true) => {
                let text = format!("block {} is said to be exclusive and is shared", first.id());
                return Err(Violation::new(text));
            }
            Ok(false) if self.world.shadow.never_shared(&[first]) => {
                let text = format!("block {} is said to be shared and never was", first.id());
                return Err(Violation::new(text));
            }
            Ok(false) => {}
            Err(error) => return Err(Violation::new(format!("a held block is refused: {error}"))),
        }
        let mut copy = [BlockHandle::new(0, BlockId(0))];
        let asked = self.world.asks(batch.tenant, 1);
        if let Err(error) = timed!(self, self.world.pool.allocate(Self::account(batch.tenant), &mut copy)) {
            self.world.check_refusal(asked, &error)?;
            return Ok(Outcome::Refused);
        }
        self.world.shadow.hand_out(self.me, &copy)?;
        self.world.shadow.giving_up(&[first], self.newest_step());
        self.batches[at as usize].blocks[0] = copy[0];
        let done = timed!(self, self.world.pool.release(&[first]));
        Self::must("releasing a copied block", done)?;
        Ok(Outcome::Done)
    }

    fn reserve(&mut self, at: u8, tenant: u8, count: u8) -> Step {
        if self.reservations[at as usize].is_some() {
            return Ok(Outcome::Skipped);
        }
        let asked = self.world.asks(tenant, count.into());
        match timed!(self, self.world.pool.reserve(Self::account(tenant), count.into())) {
            Ok(reservation) => {
                self.reservations[at as usize] = Some((reservation, tenant));
                Ok(Outcome::Done)
            }
            Err(error) => {
                self.world.check_refusal(asked, &error)?;
                Ok(Outcome::Refused)
            }
        }
    }

    fn draw(&mut self, from: u8, at: u8, count: u8) -> Step {
        let (Some((reservation, tenant)), Place::Nowhere) =
            (&mut self.reservations[from as usize], self.batches[at as usize].place)
        else {
            return Ok(Outcome::Skipped);
        };
        let (tenant, promised) = (*tenant, reservation.num_blocks());
        let count = u32::from(count).min(promised) as usize;
        if count == 0 {
            return Ok(Outcome::Skipped);
        }
        let mut blocks = [BlockHandle::new(0, BlockId(0)); MAX_BATCH];
        match timed!(self, reservation.allocate(&mut blocks[..count])) {
            Ok(()) => self.fill(at, tenant, &blocks[..count]),
            Err(Error::NeedsReclaim { .. }) if self.world.round.weights.index > 0 => Ok(Outcome::Refused),
            Err(error) => {
                Err(Violation::new(format!("{count} of {promised} promised blocks were refused: {error}")))
            }
        }
    }

    fn put_back(&mut self, to: u8, at: u8) -> Step {
        let (Some(batch), Some((reservation, tenant))) =
            (self.batch(at, Place::Held), &mut self.reservations[to as usize])
        else {
            return Ok(Outcome::Skipped);
        };
        let is_sole = self.world.shadow.never_shared(batch.blocks());
        let must = is_sole && *tenant == batch.tenant && self.world.round.stepping == 0;
        if !is_sole || *tenant != batch.tenant {
            // It may be refused, and other workers may release meanwhile: nothing could be said of its end.
            return Ok(Outcome::Skipped);
        }
        self.world.shadow.giving_up(batch.blocks(), 0);
        match timed!(self, reservation.put_back(batch.blocks())) {
            Ok(()) => {
                self.batches[at as usize].place = Place::Nowhere;
                self.remember_stale(batch.blocks[0]);
                Ok(Outcome::Done)
            }
            Err(Error::WrongState(_)) if !must => {
                self.world.shadow.held_again(batch.blocks());
                Ok(Outcome::Refused)
            }
            Err(error) => Err(Violation::new(format!("putting held blocks back failed: {error}"))),
        }
    }

    fn grow(&mut self, at: u8, count: u8) -> Step {
        let Some((reservation, tenant)) = &mut self.reservations[at as usize] else {
            return Ok(Outcome::Skipped);
        };
        let asked = self.world.asks(*tenant, count.into());
        match timed!(self, reservation.grow(count.into())) {
            Ok(()) => Ok(Outcome::Done),
            Err(error) => {
                self.world.check_refusal(asked, &error)?;
                Ok(Outcome::Refused)
            }
        }
    }

    fn shrink(&mut self, at: u8, count: u8) -> Step {
        let Some((reservation, tenant)) = &mut self.reservations[at as usize] else {
            return Ok(Outcome::Skipped);
        };
        let count = u32::from(count).min(reservation.num_blocks());
        Self::must("shrinking a reservation", timed!(self, reservation.shrink(count)))?;
        self.world.gave(*tenant, count.into());
        Ok(Outcome::Done)
    }

    fn cancel(&mut self, at: u8) -> Step {
        let Some((reservation, tenant)) = self.reservations[at as usize].take() else {
            return Ok(Outcome::Skipped);
        };
        let count = reservation.num_blocks();
        timed!(self, drop(reservation));
        self.world.gave(tenant, count.into());
        Ok(Outcome::Done)
    }

    fn open_step(&mut self, at: u8) -> Step {
        if self.steps[at as usize].is_some() {
            return Ok(Outcome::Skipped);
        }
        match timed!(self, self.world.pool.open_step()) {
            Ok(epoch) => {
                self.steps[at as usize] = Some(epoch);
                Ok(Outcome::Done)
            }
            Err(Error::WrongState(_)) => Ok(Outcome::Refused),
            Err(error) => Err(Violation::new(format!("opening a step failed: {error}"))),
        }
    }

    pub(super) fn close_step(&mut self, at: u8) -> Step {
        let Some(epoch) = self.steps[at as usize].take() else { return Ok(Outcome::Skipped) };
        self.world.shadow.closing(epoch.number());
        Self::must("closing a step", timed!(self, self.world.pool.close_step(epoch)))?;
        Ok(Outcome::Done)
    }

    fn set_quota(&mut self, tenant: u8, quota: Quota) -> Step {
        match timed!(self, self.world.pool.set_quota(Self::account(tenant), quota)) {
            Ok(()) => Ok(Outcome::Done),
            Err(Error::InvalidArgument(_)) => Ok(Outcome::Refused),
            Err(error) => Err(Violation::new(format!("setting a quota failed: {error}"))),
        }
    }

    fn open_magazine(&mut self, tenant: u8) -> Step {
        if self.magazine.is_some() {
            return Ok(Outcome::Skipped);
        }
        match timed!(self, Magazine::new(&self.world.pool, Self::account(tenant))) {
            Ok(magazine) => {
                self.magazine = Some((magazine, tenant));
                Ok(Outcome::Done)
            }
            // All lanes may be in use.
            Err(Error::WrongState(_)) => Ok(Outcome::Refused),
            Err(error) => Err(Violation::new(format!("making a magazine failed: {error}"))),
        }
    }

    fn magazine_allocate(&mut self, at: u8) -> Step {
        let (Some((magazine, tenant)), Place::Nowhere) =
            (&mut self.magazine, self.batches[at as usize].place)
        else {
            return Ok(Outcome::Skipped);
        };
        let tenant = *tenant;
        let asked = self.world.asks(tenant, 1);
        match timed!(self, magazine.allocate()) {
            Ok(block) => self.fill(at, tenant, &[block]),
            Err(error) => {
                self.world.check_refusal(asked, &error)?;
                Ok(Outcome::Refused)
            }
        }
    }

    fn magazine_release(&mut self, at: u8) -> Step {
        let Some(batch) = self.batch(at, Place::Held).filter(|_| self.magazine.is_some()) else {
            return Ok(Outcome::Skipped);
        };
        self.give_up(at, &batch);
        let Some((magazine, _)) = &mut self.magazine else { return Ok(Outcome::Skipped) };
        for &block in batch.blocks() {
            Self::must("releasing a held block", timed!(self, magazine.release(block)))?;
        }
        Ok(Outcome::Done)
    }

    fn close_magazine(&mut self) -> Step {
        let Some((magazine, _)) = self.magazine.take() else { return Ok(Outcome::Skipped) };
        timed!(self, drop(magazine));
        Ok(Outcome::Done)
    }

    pub(super) fn close_steps(&mut self) -> Result<(), Violation> {
        (0..NUM_STEPS as u8).try_for_each(|at| self.close_step(at).map(|_| ()))
    }

    /// Gives everything back, as the last operations would.
    pub(super) fn give_everything_back(&mut self) -> Result<(), Violation> {
        self.close_steps()?;
        for at in 0..NUM_RESERVATIONS as u8 {
            self.cancel(at)?;
        }
        for at in 0..NUM_BATCHES as u8 {
            self.release(at)?;
            self.unpin(at)?;
            self.evict(at)?;
        }
        while self.receive(0)? == Outcome::Done {
            self.release(0)?;
        }
        self.close_magazine()?;
        Ok(())
    }
}
