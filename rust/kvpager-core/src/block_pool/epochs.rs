//! Open steps, and what waits for them.
//!
//! Epochs are numbered from 1. `closed_through` is the newest epoch such that it and all before it are closed.
//! What is released now waits for the newest open epoch and comes back when `closed_through` reaches it.
//!
//! Each epoch has a slot with a list of blocks (one link a block, so nothing is allocated) and, for each account,
//! the capacity of indexed blocks that waits. Who puts something into a slot looks afterwards whether the epoch
//! has closed, and takes it out again then. Either that look sees the close, or the closer sees what was put
//! there: both exchange the same word (`head`, `noted`), so one of them comes second and has acquired what the
//! other did before.

use crate::error::{Error, Result};
use crate::ids::AccountId;
use crate::memory::{Asked, bytes_of};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;
use std::fmt::Display;

/// The end of a list.
pub(super) const NIL: u32 = u32::MAX;

/// A step that is open: blocks released now are not handed out before it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StepEpoch(u64);

impl StepEpoch {
    /// The epoch's number, as other processes and languages name it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// The epoch of a number. Any is accepted: the pool checks it when it is used.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }
}

/// Capacity that waits: `epoch << 32 | count`, with the low half of the epoch.
#[derive(Clone, Copy)]
struct Waiting {
    epoch: u32,
    count: u32,
}

impl Waiting {
    const fn pack(self) -> u64 {
        (self.epoch as u64) << 32 | self.count as u64
    }

    const fn unpack(word: u64) -> Self {
        Self { epoch: (word >> 32) as u32, count: word as u32 }
    }
}

#[derive(Debug)]
struct Slot {
    /// `epoch << 1 | closed` of the epoch that has this slot.
    state: AtomicU64,
    /// First block of the list.
    head: AtomicU32,
    /// The newest epoch for which any account has had capacity waiting; lets a close skip the scan.
    noted: AtomicU64,
    /// [`Waiting`] by account.
    unheld: Box<[AtomicU64]>,
}

/// Read by every release, written once a step each.
#[derive(Debug)]
struct Window {
    opened: AtomicU64,
    closed_through: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Epochs {
    window: CachePadded<Window>,
    slots: Box<[Slot]>,
    links: Box<[AtomicU32]>,
}

impl Epochs {
    /// Bytes of slots for so many steps, and of the links.
    pub(super) const fn num_bytes(num_blocks: usize, max_accounts: u32, max_open_steps: u32) -> usize {
        let slot = size_of::<Slot>() + bytes_of::<AtomicU64>(max_accounts as usize);
        slot * max_open_steps as usize + bytes_of::<AtomicU32>(num_blocks)
    }

    pub(super) fn new(
        num_blocks: usize,
        max_accounts: u32,
        max_open_steps: u32,
        memory: &Asked<impl Display>,
    ) -> Result<Self> {
        let window = Window { opened: AtomicU64::new(0), closed_through: AtomicU64::new(0) };
        let mut slots = memory.room(max_open_steps as usize)?;
        for _ in 0..max_open_steps {
            slots.push(Slot {
                state: AtomicU64::new(1),
                head: AtomicU32::new(NIL),
                noted: AtomicU64::new(0),
                unheld: memory.array(max_accounts as usize, |_| AtomicU64::new(0))?,
            });
        }
        Ok(Self {
            window: CachePadded::new(window),
            slots: slots.into_boxed_slice(),
            links: memory.array(num_blocks, |_| AtomicU32::new(NIL))?,
        })
    }

    /// Steps that may be open at once.
    pub(super) fn most_open(&self) -> u32 {
        self.slots.len() as u32
    }

    fn slot(&self, epoch: u64) -> &Slot {
        &self.slots[(epoch % self.slots.len() as u64) as usize]
    }

    pub(super) fn open(&self) -> Result<StepEpoch> {
        let room = self.slots.len() as u64;
        let mut opened = self.window.opened.load(Ordering::Acquire);
        loop {
            // Acquire pairs with the exchange in `advance`: a slot is used again after its epoch has closed.
            if opened - self.window.closed_through.load(Ordering::Acquire).min(opened) >= room {
                return Err(Error::WrongState(format!(
                    "{} open, which is the most there may be: close the oldest, {}, first",
                    crate::count(room, "step"),
                    opened + 1 - room
                )));
            }
            // AcqRel: who sees the epoch opened sees all before it. A failure means that another step was opened.
            match self.window.opened.compare_exchange(opened, opened + 1, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => break,
                Err(now) => opened = now,
            }
        }
        let epoch = opened + 1;
        // Release pairs with the Acquire in `close` and `advance`. Until then nobody can close this epoch.
        self.slot(epoch).state.store(epoch << 1, Ordering::Release);
        Ok(StepEpoch(epoch))
    }

    /// Closes a step. The epochs whose turn has come by that are handed to `drain`.
    pub(super) fn close(&self, epoch: StepEpoch, drain: impl FnMut(StepEpoch)) -> Result<()> {
        let state = &self.slot(epoch.0).state;
        // An epoch beyond 2^63 cannot be one of ours; 0 is the state of no slot.
        let open = epoch.0.checked_mul(2).unwrap_or(0);
        // AcqRel: what the closer did comes before what `advance` does, on whichever thread.
        if open == 0 || state.compare_exchange(open, open | 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(Error::WrongState(format!(
                "step epoch {} is not open; {} were opened and all through {} are closed",
                epoch.0,
                self.window.opened.load(Ordering::Relaxed),
                self.window.closed_through.load(Ordering::Relaxed)
            )));
        }
        self.advance(drain);
        Ok(())
    }

    fn advance(&self, mut drain: impl FnMut(StepEpoch)) {
        loop {
            let closed = self.window.closed_through.load(Ordering::Acquire);
            let next = closed + 1;
            // Acquire pairs with the close of `next`. If it is not closed yet, its closer comes by here later; if
            // `closed_through` has moved on, the next round sees it.
            let state = self.slot(next).state.load(Ordering::Acquire);
            if state != next << 1 | 1 {
                if self.window.closed_through.load(Ordering::Acquire) == closed {
                    return;
                }
                continue;
            }
            let moved = self.window.closed_through.compare_exchange(
                closed,
                next,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            if moved.is_ok() {
                drain(StepEpoch(next));
            }
        }
    }

    /// The newest epoch if any is open: what is released now waits for it.
    pub(super) fn newest_open(&self) -> Option<StepEpoch> {
        // Acquire pairs with `open`: a step opened before the caller released is seen.
        let opened = self.window.opened.load(Ordering::Acquire);
        (opened > self.closed_through()).then_some(StepEpoch(opened))
    }

    pub(super) fn closed_through(&self) -> u64 {
        // Acquire pairs with `advance`: who sees the close sees what the closer did before.
        self.window.closed_through.load(Ordering::Acquire)
    }

    pub(super) fn is_closed(&self, epoch: StepEpoch) -> bool {
        self.closed_through() >= epoch.0
    }

    /// Links `block` in front of `next`. The block is the caller's until the chain is pushed.
    pub(super) fn link(&self, block: u32, next: u32) {
        // Relaxed: published by the exchange in `push`.
        self.links[block as usize].store(next, Ordering::Relaxed);
    }

    pub(super) fn next(&self, block: u32) -> u32 {
        self.links[block as usize].load(Ordering::Relaxed)
    }

    /// Puts a chain of blocks on an epoch's list.
    pub(super) fn push(&self, epoch: StepEpoch, first: u32, last: u32) {
        let head = &self.slot(epoch.0).head;
        let mut now = head.load(Ordering::Relaxed);
        loop {
            self.link(last, now);
            // AcqRel: Release pairs with `take_list`; Acquire, so that if this push comes after the closer's take,
            // the look at `closed_through` that follows sees the close. ABA cannot hurt: lists are taken whole.
            match head.compare_exchange_weak(now, first, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(changed) => now = changed,
            }
        }
    }

    /// Takes an epoch's whole list. It may hold blocks that wait for a later epoch with the same slot, pushed
    /// since this one closed: those go back.
    pub(super) fn take_list(&self, epoch: StepEpoch) -> u32 {
        // AcqRel: as in `push`.
        self.slot(epoch.0).head.swap(NIL, Ordering::AcqRel)
    }

    /// Notes capacity of indexed blocks that comes back with an epoch. Returns what has to come back at once: the
    /// noted capacity if a later epoch has the slot already, or what an earlier one left.
    pub(super) fn push_unheld(&self, epoch: StepEpoch, account: AccountId, count: u32) -> u32 {
        let slot = self.slot(epoch.0);
        let cell = &slot.unheld[account.0 as usize];
        let mut word = cell.load(Ordering::Acquire);
        loop {
            let now = Waiting::unpack(word);
            let ahead = now.epoch.wrapping_sub(epoch.0 as u32);
            if ahead != 0 && ahead < u32::MAX / 2 {
                return count;
            }
            let (kept, left) = if ahead == 0 { (now.count, 0) } else { (0, now.count) };
            let next = Waiting { epoch: epoch.0 as u32, count: kept + count };
            // AcqRel: as for `noted`. A failure means that another thread noted or took.
            match cell.compare_exchange_weak(word, next.pack(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    // AcqRel: pairs with `take_unheld`, as `head` does for the list.
                    slot.noted.fetch_max(epoch.0, Ordering::AcqRel);
                    return left;
                }
                Err(changed) => word = changed,
            }
        }
    }

    /// Takes the noted capacity of an epoch, by account.
    pub(super) fn take_unheld(&self, epoch: StepEpoch, mut give: impl FnMut(AccountId, u32)) {
        let slot = self.slot(epoch.0);
        // AcqRel: pairs with `push_unheld`. An exchange rather than a load, so that one of the two is second.
        if slot.noted.fetch_max(0, Ordering::AcqRel) < epoch.0 {
            return;
        }
        for (account, cell) in slot.unheld.iter().enumerate() {
            let word = cell.load(Ordering::Acquire);
            let mut now = Waiting::unpack(word);
            while now.epoch == epoch.0 as u32 && now.count > 0 {
                let none = Waiting { count: 0, ..now };
                // AcqRel: who noted it comes before who gives it back. A failure means that more was noted.
                match cell.compare_exchange(now.pack(), none.pack(), Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => {
                        give(AccountId(account as u32), now.count);
                        break;
                    }
                    Err(changed) => now = Waiting::unpack(changed),
                }
            }
        }
    }
}
