//! Quarantine: what is released while steps are open comes back when all of them have closed.
//!
//! Epochs are numbered from 1. `closed_through` is the newest epoch such that it and all before it are closed. A
//! block released now is pushed onto the list of the newest open epoch and comes back when `closed_through`
//! reaches it. Lists are intrusive (one link a block), so nothing is allocated.

use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockId};
use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering};

const NIL: u32 = u32::MAX;

/// A step that is open: blocks released now are not handed out before it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepEpoch(u64);

impl StepEpoch {
    /// Its number, from 1.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The step of a number. Any is accepted: the pool checks it when it is closed.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }
}

#[derive(Debug)]
struct Slot {
    /// `epoch << 1 | closed` of the epoch that has this slot.
    state: AtomicU64,
    /// First block of the list.
    head: AtomicU32,
    /// Capacity of indexed blocks that comes back by account.
    unheld: Box<[AtomicI64]>,
    /// Accounts with anything in `unheld`; 0 lets a close skip the scan.
    num_unheld: AtomicI64,
}

#[derive(Debug)]
pub(super) struct Epochs {
    slots: Box<[Slot]>,
    opened: AtomicU64,
    closed_through: AtomicU64,
    next: Box<[AtomicU32]>,
    /// Low half of the epoch that a listed block waits for.
    waits_for: Box<[AtomicU32]>,
}

impl Epochs {
    pub(super) fn new(num_blocks: u32, max_accounts: u32, max_open_steps: u32) -> Self {
        let slot = || Slot {
            state: AtomicU64::new(1),
            head: AtomicU32::new(NIL),
            unheld: (0..max_accounts).map(|_| AtomicI64::new(0)).collect(),
            num_unheld: AtomicI64::new(0),
        };
        Self {
            slots: (0..max_open_steps).map(|_| slot()).collect(),
            opened: AtomicU64::new(0),
            closed_through: AtomicU64::new(0),
            next: (0..num_blocks).map(|_| AtomicU32::new(NIL)).collect(),
            waits_for: (0..num_blocks).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    fn slot(&self, epoch: u64) -> &Slot {
        &self.slots[(epoch % self.slots.len() as u64) as usize]
    }

    pub(super) fn open(&self) -> Result<StepEpoch> {
        let room = self.slots.len() as u64;
        // AcqRel on both counters: a slot is reused only after its last close was seen.
        let opened = self.opened.fetch_update(Ordering::AcqRel, Ordering::Acquire, |opened| {
            (opened - self.closed_through.load(Ordering::Acquire) < room).then_some(opened + 1)
        });
        let epoch = opened.map_err(|opened| {
            Error::WrongState(format!(
                "{} steps are open, at most {room} may be: close the oldest, {}, first",
                room,
                opened - room + 1
            ))
        })? + 1;
        // Release pairs with the Acquire in `close` and `advance`.
        self.slot(epoch).state.store(epoch << 1, Ordering::Release);
        Ok(StepEpoch(epoch))
    }

    /// Closes a step. The epochs whose turn has come by that are handed to `drain`.
    pub(super) fn close(&self, epoch: StepEpoch, drain: impl FnMut(u64)) -> Result<()> {
        let state = &self.slot(epoch.0).state;
        let open = epoch.0 << 1;
        if epoch.0 == 0
            || state.compare_exchange(open, open | 1, Ordering::AcqRel, Ordering::Acquire).is_err()
        {
            return Err(Error::WrongState(format!(
                "step epoch {} is not open; {} were opened and all through {} are closed",
                epoch.0,
                self.opened.load(Ordering::Relaxed),
                self.closed_through.load(Ordering::Relaxed)
            )));
        }
        self.advance(drain);
        Ok(())
    }

    fn advance(&self, mut drain: impl FnMut(u64)) {
        loop {
            let closed = self.closed_through.load(Ordering::Acquire);
            let next = closed + 1;
            if self.slot(next).state.load(Ordering::Acquire) != next << 1 | 1 {
                return;
            }
            // AcqRel: what the closers did comes before what is done with the drained blocks.
            if self.closed_through.compare_exchange(closed, next, Ordering::AcqRel, Ordering::Acquire).is_ok()
            {
                drain(next);
            }
        }
    }

    /// The newest epoch if any is open: what is released now waits for it.
    pub(super) fn newest_open(&self) -> Option<StepEpoch> {
        let opened = self.opened.load(Ordering::Acquire);
        (opened > self.closed_through.load(Ordering::Acquire)).then_some(StepEpoch(opened))
    }

    pub(super) fn is_closed(&self, epoch: StepEpoch) -> bool {
        self.closed_through.load(Ordering::Acquire) >= epoch.0
    }

    /// Puts a block on an epoch's list. The caller checks afterwards whether the epoch has closed meanwhile, and
    /// drains it itself then.
    pub(super) fn push(&self, epoch: StepEpoch, block: BlockId) {
        let head = &self.slot(epoch.0).head;
        self.waits_for[block.0 as usize].store(epoch.0 as u32, Ordering::Relaxed);
        let mut first = head.load(Ordering::Relaxed);
        loop {
            self.next[block.0 as usize].store(first, Ordering::Relaxed);
            // Release pairs with the Acquire of `take_list`. ABA cannot hurt: the list is only ever taken whole.
            match head.compare_exchange_weak(first, block.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }

    /// Takes an epoch's whole list and hands its blocks over.
    ///
    /// A push that comes after the epoch has closed may land on a slot that a later epoch has by now. Each block
    /// says itself what it waits for, so a list that is taken early goes back.
    pub(super) fn take_list(&self, epoch: u64, mut give: impl FnMut(BlockId)) {
        let mut block = self.slot(epoch).head.swap(NIL, Ordering::Acquire);
        while block != NIL {
            // Read before `give`: afterwards the block is somebody else's.
            let next = self.next[block as usize].load(Ordering::Relaxed);
            let closed = self.closed_through.load(Ordering::Acquire);
            let ahead = self.waits_for[block as usize].load(Ordering::Relaxed).wrapping_sub(closed as u32);
            if ahead == 0 || ahead > u32::MAX / 2 {
                give(BlockId(block));
            } else {
                self.push(StepEpoch(closed + u64::from(ahead)), BlockId(block));
            }
            block = next;
        }
    }

    /// Notes capacity of indexed blocks that comes back with an epoch.
    pub(super) fn push_unheld(&self, epoch: StepEpoch, account: AccountId, count: u32) {
        let slot = self.slot(epoch.0);
        slot.unheld[account.0 as usize].fetch_add(i64::from(count), Ordering::Release);
        slot.num_unheld.fetch_add(1, Ordering::Release);
    }

    /// Takes the noted capacity of an epoch, by account.
    pub(super) fn take_unheld(&self, epoch: u64, mut give: impl FnMut(AccountId, u32)) {
        let slot = self.slot(epoch);
        if slot.num_unheld.swap(0, Ordering::Acquire) == 0 {
            return;
        }
        for (account, count) in slot.unheld.iter().enumerate() {
            let count = count.swap(0, Ordering::Acquire);
            if count > 0 {
                give(AccountId(account as u32), count as u32);
            }
        }
    }
}
