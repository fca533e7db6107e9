//! Draws a worker's next operation: legal work, and now and then a call that must be refused.

use super::operation::Op;
use super::settings::Round;
use super::worker::{Batch, NUM_BATCHES, NUM_RESERVATIONS, NUM_STALE, NUM_STEPS, Place, Worker};
use fastrand::Rng;

/// Draws operations that fit what a worker has.
pub(super) struct Generator {
    random: Rng,
    round: Round,
    /// Running sums of the weights, in the order of [`Generator::next`].
    sums: [u32; 10],
}

impl Generator {
    pub(super) fn new(round: Round, me: usize) -> Self {
        let weights = round.weights;
        let step = if me < round.stepping { weights.step } else { 0 };
        // The first stepping worker of few does little else: it is the engine.
        let step = if step > 0 && round.stepping == 1 && round.threads > 1 { step * 20 } else { step };
        let each = [
            weights.allocate,
            weights.release,
            weights.share,
            weights.copy,
            weights.reserve,
            weights.magazine,
            step,
            weights.quota,
            weights.index,
            weights.probe,
        ];
        let mut sum = 0;
        let sums = each.map(|weight| {
            sum += weight;
            sum
        });
        Self { random: Rng::with_seed(round.seed ^ (me as u64 + 1) << 32), round, sums }
    }

    /// The next operation. It may turn out to be one that the worker skips.
    pub(super) fn next<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        if worker.was_refused && self.random.bool() {
            return self.make_room(worker);
        }
        let drawn = self.random.u32(..self.sums[9]);
        match self.sums.iter().position(|sum| drawn < *sum).unwrap_or(0) {
            0 => self.allocate(worker),
            1 => self.release(worker),
            2 => self.share(worker),
            3 => Op::CopyOnWrite { batch: self.find(worker, |place| place == Place::Held) },
            4 => self.reserve(worker),
            5 => self.magazine(worker),
            6 => self.step(worker),
            7 => self.quota(),
            8 => self.index(worker),
            _ => self.probe(worker),
        }
    }

    /// A batch whose place is wanted, from a random one on; any, if there is none.
    fn find<const F: u8>(&mut self, worker: &Worker<'_, F>, wanted: impl Fn(Place) -> bool) -> u8 {
        let first = self.random.usize(..NUM_BATCHES);
        let fits = |at: &usize| {
            let Batch { place, .. } = worker.batches[*at % NUM_BATCHES];
            wanted(place)
        };
        ((first..first + NUM_BATCHES).find(fits).unwrap_or(first) % NUM_BATCHES) as u8
    }

    fn empty<const F: u8>(&mut self, worker: &Worker<'_, F>) -> u8 {
        self.find(worker, |place| place == Place::Nowhere)
    }

    fn tenant(&mut self) -> u8 {
        self.random.u8(..self.round.tenants)
    }

    /// Mostly few blocks, now and then many.
    fn count(&mut self) -> u8 {
        let most = self.round.max_batch;
        match self.random.u8(..8) {
            0..4 => 1,
            4..6 => self.random.u8(1..=most.min(8)),
            6 => self.random.u8(1..=most),
            _ => most,
        }
    }

    /// Gives something back, after a refusal: a pool that stays full shows little.
    fn make_room<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        match self.random.u8(..4) {
            0 => Op::Cancel { reservation: self.random.u8(..NUM_RESERVATIONS as u8) },
            1 if worker.magazine.is_some() => Op::CloseMagazine,
            2 if self.round.weights.index > 0 => {
                Op::Evict { batch: self.find(worker, |place| matches!(place, Place::Cached(_))) }
            }
            _ => self.release(worker),
        }
    }

    fn allocate<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        Op::Allocate { batch: self.empty(worker), tenant: self.tenant(), count: self.count() }
    }

    fn release<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        let batch = self.find(worker, |place| place == Place::Held);
        if worker.magazine.is_some() && self.random.bool() {
            return Op::MagazineRelease { batch };
        }
        Op::Release { batch }
    }

    fn share<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        match self.random.u8(..4) {
            0 => Op::Retain {
                batch: self.find(worker, |place| place == Place::Held),
                copy: self.empty(worker),
            },
            1 => Op::Receive { batch: self.empty(worker) },
            _ => Op::Send {
                batch: self.find(worker, |place| place == Place::Held),
                to: self.random.usize(..self.round.threads) as u8,
            },
        }
    }

    fn reserve<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        let reservation = self.random.u8(..NUM_RESERVATIONS as u8);
        if worker.reservations[reservation as usize].is_none() {
            return Op::Reserve { reservation, tenant: self.tenant(), count: self.count() };
        }
        match self.random.u8(..8) {
            0..4 => Op::Draw { reservation, batch: self.empty(worker), count: self.count() },
            4 => Op::PutBack { reservation, batch: self.find(worker, |place| place == Place::Held) },
            5 => Op::Grow { reservation, count: self.count() },
            6 => Op::Shrink { reservation, count: self.count() },
            _ => Op::Cancel { reservation },
        }
    }

    fn magazine<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        if worker.magazine.is_none() {
            return Op::OpenMagazine { tenant: self.tenant() };
        }
        match self.random.u8(..16) {
            0 => Op::CloseMagazine,
            1..10 => Op::MagazineAllocate { batch: self.empty(worker) },
            _ => Op::MagazineRelease { batch: self.find(worker, |place| place == Place::Held) },
        }
    }

    fn step<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        let step = self.random.u8(..NUM_STEPS as u8);
        if worker.steps[step as usize].is_none() { Op::OpenStep { step } } else { Op::CloseStep { step } }
    }

    fn quota(&mut self) -> Op {
        let tenant = self.tenant();
        let limit = self.random.u32(1..=self.round.blocks);
        let most = limit.min(self.round.blocks / u32::from(self.round.tenants));
        Op::SetQuota { tenant, guaranteed: self.random.u32(0..=most), limit }
    }

    fn index<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        let cached = |place| matches!(place, Place::Cached(_));
        match self.random.u8(..8) {
            0..3 => Op::Index { batch: self.find(worker, |place| place == Place::Held) },
            3..5 => Op::Unpin { batch: self.find(worker, |place| place == Place::Pinned) },
            5 => Op::Pin { batch: self.find(worker, cached) },
            6 => Op::Evict { batch: self.find(worker, cached) },
            _ => Op::Trade {
                batch: self.find(worker, |place| place == Place::Held),
                cached: self.find(worker, cached),
            },
        }
    }

    fn probe<const F: u8>(&mut self, worker: &Worker<'_, F>) -> Op {
        use super::operation::Probe;
        let probe = self.round.draw_probe(&mut self.random);
        let batch = match probe {
            Probe::Stale => self.random.u8(..NUM_STALE as u8),
            Probe::EvictTwice => self.find(worker, |place| matches!(place, Place::Cached(_))),
            _ => self.find(worker, |place| place == Place::Held),
        };
        Op::Probe { probe, batch }
    }
}
