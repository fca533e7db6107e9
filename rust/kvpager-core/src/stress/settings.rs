//! What a run is asked for, and what each round makes of it.

use super::operation::{PROBES, Probe};
use crate::block_pool::faults;
use crate::error::{Error, Result};
use fastrand::Rng;
use std::time::Duration;

/// Which work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Allocate, reserve, draw, release, steps, magazines.
    Alloc,
    /// Besides, blocks shared between threads, and blocks in the index.
    Share,
    /// Besides, copy on write.
    Cow,
    /// As `Alloc`, while quotas change.
    Quota,
    /// Everything.
    All,
}

/// Names of the mixes.
pub const MIXES: [(&str, Mix); 5] = [
    ("alloc", Mix::Alloc),
    ("share", Mix::Share),
    ("cow", Mix::Cow),
    ("quota", Mix::Quota),
    ("all", Mix::All),
];

/// Other names of faults, for what a caller would see of them.
const ALIASES: [(&str, u8); 2] =
    [("double-release", faults::BLIND_RELEASE), ("stale-handle", faults::SAME_GENERATION)];

/// Faults that can be planted: all but one, a missing ordering, that only a model or the thread sanitizer can see.
fn plantable() -> impl Iterator<Item = (&'static str, u8)> {
    let seen = faults::ALL.iter().filter(|(fault, _)| *fault != faults::RELAXED_BITS);
    ALIASES.into_iter().chain(seen.map(|(fault, name)| (*name, *fault)))
}

/// Names of the faults that can be planted.
pub fn fault_names() -> impl Iterator<Item = &'static str> {
    plantable().map(|(name, _)| name)
}

fn fault_from_name(name: &str) -> Result<u8> {
    plantable().find(|(known, _)| *known == name).map(|(_, fault)| fault).ok_or_else(|| {
        let known: Vec<_> = fault_names().collect();
        Error::invalid(format!("fault {name:?} is not one of {}", known.join(", ")))
    })
}

/// What a run is asked for.
#[derive(Clone, Copy, Debug)]
pub struct StressConfig {
    /// Threads that work at once, 1 to 256.
    pub threads: u32,
    /// Blocks of the largest pool, 1 to 2^24; many rounds use a smaller one.
    pub blocks: u32,
    /// Accounts of a pool, 1 to 250.
    pub tenants: u32,
    /// Which work.
    pub mix: Mix,
    /// Of everything that is drawn.
    pub seed: u64,
    /// The fault planted into every pool.
    pub fault: u8,
    /// Longest time that is spent on making a failing history small.
    pub shrink_time: Duration,
}

impl StressConfig {
    /// Reads the names of a mix and a fault.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown name or a number out of range.
    pub fn new(
        (threads, blocks, tenants): (u32, u32, u32),
        mix: &str,
        seed: u64,
        fault: Option<&str>,
    ) -> Result<Self> {
        for (name, value, most) in
            [("threads", threads, 256), ("blocks", blocks, 1 << 24), ("tenants", tenants, 250)]
        {
            if !(1..=most).contains(&value) {
                return Err(Error::invalid(format!("{name} is {value}, must be 1 to {most}")));
            }
        }
        let found = MIXES.iter().find(|(name, _)| *name == mix).map(|(_, mix)| *mix);
        let mix = found.ok_or_else(|| {
            let known: Vec<_> = MIXES.iter().map(|(name, _)| *name).collect();
            Error::invalid(format!("mix {mix:?} is not one of {}", known.join(", ")))
        })?;
        let fault = fault.map_or(Ok(faults::NONE), fault_from_name)?;
        Ok(Self { threads, blocks, tenants, mix, seed, fault, shrink_time: Duration::from_secs(10) })
    }
}

/// How often an operation is drawn, for each kind of operation that the generator knows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Weights {
    pub(super) allocate: u32,
    pub(super) release: u32,
    pub(super) share: u32,
    pub(super) copy: u32,
    pub(super) reserve: u32,
    pub(super) magazine: u32,
    pub(super) step: u32,
    pub(super) quota: u32,
    pub(super) index: u32,
    pub(super) probe: u32,
}

/// One round: a fresh pool and what is done with it. Rounds differ in what they leave out, since what is always there
/// (a free block, an open step) hides faults.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) seed: u64,
    pub(super) threads: usize,
    pub(super) blocks: u32,
    pub(super) tenants: u8,
    pub(super) max_open_steps: u32,
    /// Most blocks of a batch.
    pub(super) max_batch: u8,
    /// Operations of a worker.
    pub(super) operations: usize,
    /// Workers that open steps: the first so many.
    pub(super) stepping: usize,
    pub(super) weights: Weights,
    /// Share of capacity that is guaranteed to somebody, in eighths.
    pub(super) guaranteed_eighths: u32,
}

/// Sizes at which threads meet on the same words.
const CRAMPED: [u32; 8] = [1, 2, 7, 24, 25, 49, 100, 300];
/// More steps than are opened between two standstills: what a step loses is not found by a later one with its slot.
const MANY_STEPS: u32 = 1 << 14;
/// Operations that are recorded at most, over all workers.
const MAX_RECORDED: usize = 1 << 22;

impl Round {
    /// The settings of a run's round of this number.
    pub(super) fn new(config: &StressConfig, number: u64) -> Self {
        let seed =
            config.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number.wrapping_mul(0xd1b5_4a32_d192_ed03);
        let mut random = Rng::with_seed(seed);
        let cramped = random.u8(..3) > 0;
        let blocks =
            if cramped { config.blocks.min(CRAMPED[random.usize(..CRAMPED.len())]) } else { config.blocks };
        let threads = config.threads as usize;
        let most = (1usize << random.u32(9..17)).min(MAX_RECORDED / threads);
        let weights = draw_weights(config.mix, &mut random);
        let stepping = if weights.step == 0 {
            0
        } else if random.bool() {
            1
        } else {
            threads
        };
        Self {
            seed,
            threads,
            blocks,
            tenants: config.tenants as u8,
            max_open_steps: [2, 64, MANY_STEPS, MANY_STEPS][random.usize(..4)],
            max_batch: if random.u8(..4) == 0 { 1 } else { (blocks / 2).clamp(1, 64) as u8 },
            operations: most,
            stepping,
            weights,
            guaranteed_eighths: random.u32(0..=7),
        }
    }

    /// Whether a tenant's demand can be followed exactly: every block has one holder, and no quota changes.
    pub(super) const fn is_plain(&self) -> bool {
        let Weights { share, copy, step, quota, index, magazine, .. } = self.weights;
        share == 0 && copy == 0 && step == 0 && quota == 0 && index == 0 && magazine == 0
    }

    /// Guarantee and limit of a tenant at the start.
    pub(super) fn quota(&self, tenant: u8) -> (u32, u32) {
        let guaranteed = self.blocks / 8 * self.guaranteed_eighths / u32::from(self.tenants);
        let limit = if tenant.is_multiple_of(2) { self.blocks } else { (self.blocks * 3 / 4).max(1) };
        (guaranteed.min(limit), limit)
    }

    pub(super) fn draw_probe(&self, random: &mut Rng) -> Probe {
        PROBES[random.usize(..PROBES.len() - usize::from(self.weights.index == 0))]
    }
}

fn draw_weights(mix: Mix, random: &mut Rng) -> Weights {
    let mut often = |weight: u32, of_four: u8| if random.u8(..4) < of_four { weight } else { 0 };
    let mut weights = Weights {
        allocate: 30,
        release: 25,
        reserve: often(20, 2),
        magazine: often(20, 2),
        step: often(8, 2),
        probe: 3,
        ..Weights::default()
    };
    if matches!(mix, Mix::Share | Mix::Cow | Mix::All) {
        weights.share = often(30, 3);
        weights.index = often(15, 2);
    }
    if matches!(mix, Mix::Cow | Mix::All) {
        weights.copy = often(15, 3);
    }
    if matches!(mix, Mix::Quota | Mix::All) {
        weights.quota = often(15, 2);
    }
    match mix {
        Mix::Share if weights.index == 0 => weights.share = 30,
        Mix::Cow => weights.copy = weights.copy.max(5),
        Mix::Quota => weights.quota = 15,
        _ => {}
    }
    weights
}
