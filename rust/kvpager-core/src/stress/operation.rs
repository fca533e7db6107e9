//! What a worker does next.

use std::fmt::{Display, Formatter, Result};

/// One operation of one worker. Its numbers name places of that worker (a batch, a reservation, a step), not blocks,
/// so any list of operations can be run again: what has no object at the place that it names is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Allocate {
        batch: u8,
        tenant: u8,
        count: u8,
    },
    /// Retains a batch and keeps the new references as another one.
    Retain {
        batch: u8,
        copy: u8,
    },
    Release {
        batch: u8,
    },
    /// Retains a batch and puts the new references into another worker's mailbox.
    Send {
        batch: u8,
        to: u8,
    },
    Receive {
        batch: u8,
    },
    CopyOnWrite {
        batch: u8,
    },
    Reserve {
        reservation: u8,
        tenant: u8,
        count: u8,
    },
    Draw {
        reservation: u8,
        batch: u8,
        count: u8,
    },
    PutBack {
        reservation: u8,
        batch: u8,
    },
    Grow {
        reservation: u8,
        count: u8,
    },
    Shrink {
        reservation: u8,
        count: u8,
    },
    Cancel {
        reservation: u8,
    },
    OpenStep {
        step: u8,
    },
    CloseStep {
        step: u8,
    },
    SetQuota {
        tenant: u8,
        guaranteed: u32,
        limit: u32,
    },
    OpenMagazine {
        tenant: u8,
    },
    MagazineAllocate {
        batch: u8,
    },
    MagazineRelease {
        batch: u8,
    },
    CloseMagazine,
    /// Hands a batch to the index, pinned.
    Index {
        batch: u8,
    },
    Unpin {
        batch: u8,
    },
    Pin {
        batch: u8,
    },
    Evict {
        batch: u8,
    },
    /// Gives one batch up and pins a cached one with its capacity.
    Trade {
        batch: u8,
        cached: u8,
    },
    /// A call that must be refused and change nothing.
    Probe {
        probe: Probe,
        batch: u8,
    },
}

/// Calls that must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    /// Releases a batch, then releases it again.
    ReleaseAgain,
    /// Uses the handle of a block that was released.
    Stale,
    /// Releases and retains a good batch with a stale handle at its end.
    StaleAtTheEnd,
    /// Names one block of a batch more often than it is held.
    NamedTwice,
    /// Uses handles that were never issued.
    NeverIssued,
    /// Evicts a cached batch that names one block twice.
    EvictTwice,
}

pub(super) const PROBES: [Probe; 6] = [
    Probe::ReleaseAgain,
    Probe::Stale,
    Probe::StaleAtTheEnd,
    Probe::NamedTwice,
    Probe::NeverIssued,
    Probe::EvictTwice,
];

/// Operations whose latencies are counted together.
pub(super) const FAMILIES: [&str; 9] =
    ["allocate", "release", "retain", "copy_on_write", "reserve", "magazine", "step", "quota", "index"];

impl Op {
    /// Its place in [`FAMILIES`]; `None` for probes, whose refusals are no work.
    pub(super) const fn family(self) -> Option<usize> {
        Some(match self {
            Self::Allocate { .. } => 0,
            Self::Release { .. } => 1,
            Self::Retain { .. } | Self::Send { .. } | Self::Receive { .. } => 2,
            Self::CopyOnWrite { .. } => 3,
            Self::Reserve { .. }
            | Self::Draw { .. }
            | Self::PutBack { .. }
            | Self::Grow { .. }
            | Self::Shrink { .. }
            | Self::Cancel { .. } => 4,
            Self::OpenMagazine { .. }
            | Self::MagazineAllocate { .. }
            | Self::MagazineRelease { .. }
            | Self::CloseMagazine => 5,
            Self::OpenStep { .. } | Self::CloseStep { .. } => 6,
            Self::SetQuota { .. } => 7,
            Self::Index { .. }
            | Self::Unpin { .. }
            | Self::Pin { .. }
            | Self::Evict { .. }
            | Self::Trade { .. } => 8,
            Self::Probe { .. } => return None,
        })
    }

    /// The same with fewer blocks, if it names a number of them.
    pub(super) const fn with_count(self, count: u8) -> Option<Self> {
        Some(match self {
            Self::Allocate { batch, tenant, .. } => Self::Allocate { batch, tenant, count },
            Self::Reserve { reservation, tenant, .. } => Self::Reserve { reservation, tenant, count },
            Self::Draw { reservation, batch, .. } => Self::Draw { reservation, batch, count },
            Self::Grow { reservation, .. } => Self::Grow { reservation, count },
            Self::Shrink { reservation, .. } => Self::Shrink { reservation, count },
            _ => return None,
        })
    }
}

impl Display for Op {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Allocate { batch, tenant, count } => {
                write!(f, "allocate {count} for tenant {tenant} as batch {batch}")
            }
            Self::Retain { batch, copy } => write!(f, "retain batch {batch} as batch {copy}"),
            Self::Release { batch } => write!(f, "release batch {batch}"),
            Self::Send { batch, to } => write!(f, "retain batch {batch} for thread {to}"),
            Self::Receive { batch } => write!(f, "receive a batch as batch {batch}"),
            Self::CopyOnWrite { batch } => write!(f, "copy on write, first block of batch {batch}"),
            Self::Reserve { reservation, tenant, count } => {
                write!(f, "reserve {count} for tenant {tenant} as reservation {reservation}")
            }
            Self::Draw { reservation, batch, count } => {
                write!(f, "draw {count} of reservation {reservation} as batch {batch}")
            }
            Self::PutBack { reservation, batch } => {
                write!(f, "put batch {batch} back into reservation {reservation}")
            }
            Self::Grow { reservation, count } => write!(f, "grow reservation {reservation} by {count}"),
            Self::Shrink { reservation, count } => write!(f, "shrink reservation {reservation} by {count}"),
            Self::Cancel { reservation } => write!(f, "drop reservation {reservation}"),
            Self::OpenStep { step } => write!(f, "open step {step}"),
            Self::CloseStep { step } => write!(f, "close step {step}"),
            Self::SetQuota { tenant, guaranteed, limit } => {
                write!(f, "set the quota of tenant {tenant} to {guaranteed} guaranteed, at most {limit}")
            }
            Self::OpenMagazine { tenant } => write!(f, "make a magazine for tenant {tenant}"),
            Self::MagazineAllocate { batch } => write!(f, "allocate 1 from the magazine as batch {batch}"),
            Self::MagazineRelease { batch } => write!(f, "release batch {batch} into the magazine"),
            Self::CloseMagazine => write!(f, "drop the magazine"),
            Self::Index { batch } => write!(f, "hand batch {batch} to the index, pinned"),
            Self::Unpin { batch } => write!(f, "unpin batch {batch}"),
            Self::Pin { batch } => write!(f, "pin batch {batch}"),
            Self::Evict { batch } => write!(f, "evict batch {batch}"),
            Self::Trade { batch, cached } => write!(f, "trade batch {batch} for cached batch {cached}"),
            Self::Probe { probe, batch } => match probe {
                Probe::ReleaseAgain => write!(f, "release batch {batch} twice"),
                Probe::Stale => write!(f, "use a stale handle"),
                Probe::StaleAtTheEnd => write!(f, "release batch {batch} with a stale handle at its end"),
                Probe::NamedTwice => write!(f, "release batch {batch} with one block named twice"),
                Probe::NeverIssued => write!(f, "use handles that were never issued"),
                Probe::EvictTwice => write!(f, "evict batch {batch} with one block named twice"),
            },
        }
    }
}
