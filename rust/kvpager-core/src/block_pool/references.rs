//! Adding and dropping references.

use super::freeing::Chain;
use super::groups::place;
use super::state::{Kind, MAX_REFERENCES, State};
use super::taking::{Found, Plan, Rule, Taken};
use super::{BlockPool, faults};
use crate::error::{Error, HandleFault, Result};
use crate::ids::BlockHandle;
use crate::sync::Ordering;

/// Words of the filter that finds blocks named twice.
const FILTER: usize = 64;

/// What a release of a batch with shared blocks has taken so far: all of it is off and this call's alone.
struct Own {
    /// Were exclusive.
    taken: Chain,
    /// Were shared, and this call dropped the last reference.
    dropped: Chain,
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Adds a reference to each block, once for each time it is named.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a block that is not held by references; nothing has changed then.
    ///
    /// # Concurrency
    /// Who retains holds a reference, or knows that nobody drops the last one meanwhile. If one is dropped all the
    /// same, the call fails, and may have held the other blocks of the batch for a moment.
    pub fn retain(&self, blocks: &[BlockHandle]) -> Result<()> {
        if !matches!(FAULT, faults::BLIND_RETAIN | faults::KEEP_PARTIAL) {
            self.check_retained(blocks)?;
        }
        for (i, &block) in blocks.iter().enumerate() {
            if let Err(error) = self.retain_one(block) {
                // Checked above, so the last reference went away meanwhile. What was retained is dropped again.
                if FAULT != faults::KEEP_PARTIAL {
                    self.drop_again(&blocks[..i]);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn check_retained(&self, blocks: &[BlockHandle]) -> Result<()> {
        for &block in blocks {
            let state = self.state(self.checked_id(block)?);
            check_retainable(state, block, 1)?;
            if state.references as usize + blocks.len() > MAX_REFERENCES as usize {
                check_retainable(state, block, times(blocks, block))?;
            }
        }
        Ok(())
    }

    fn retain_one(&self, block: BlockHandle) -> Result<()> {
        let (group, bit) = place(self.checked_id(block)?);
        loop {
            let seen = self.groups.load(group);
            let state = self.state(block.id().0);
            if state.generation != block.generation() && FAULT != faults::BLIND_RETAIN {
                return Err(state.fault(block));
            }
            if seen.shared() & bit != 0 {
                break;
            }
            if seen.exclusive() & bit == 0 {
                return Err(state.fault(block));
            }
            // The handle was good after `seen` was loaded; see `take_planned`. Two threads that share a block for
            // the first time at once: one exchange wins, the other sees the block shared, and both count below.
            if self.groups.try_share(group, seen, bit) {
                break;
            }
        }
        self.exchange(block, |state| {
            if FAULT != faults::BLIND_RETAIN {
                check_retainable(state, block, 1)?;
            }
            Ok(State { kind: Kind::Shared, references: state.references + 1, ..state })
        })?;
        Ok(())
    }

    /// Drops references that this call added.
    fn drop_again(&self, blocks: &[BlockHandle]) {
        let mut dropped = Chain::EMPTY;
        for &block in blocks {
            let dropping = self.drop_one(block, &mut dropped);
            debug_assert!(dropping.is_ok() || FAULT != faults::NONE, "{dropping:?}");
        }
        self.let_go(dropped);
    }

    /// Takes a reference from each block, once for each time it is named. The last one frees the block, or
    /// quarantines it while steps are open.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a stale or foreign handle, or more releases than references; nothing has
    /// changed then.
    ///
    /// # Concurrency
    /// If two threads release one and the same reference of a shared block at once, which is a bug of the caller,
    /// one of them fails. It gives back what it had taken of the rest of its batch, except references to blocks
    /// that their other holders let go of in that moment.
    pub fn release(&self, blocks: &[BlockHandle]) -> Result<()> {
        if let [block] = blocks
            && FAULT != faults::EARLY_PERMIT
            && let Some(account) = self.take_out_one(*block, None)
        {
            match self.waiting_for() {
                None => {
                    self.free_one(*block);
                    self.give_back(account, 1);
                }
                Some(epoch) => self.quarantine(blocks, epoch),
            }
            return Ok(());
        }
        self.release_batch(blocks)
    }

    fn release_batch(&self, blocks: &[BlockHandle]) -> Result<()> {
        let mut plan = Plan::new();
        let taken = self.take_out(&mut plan, blocks, Rule::Release)?;
        if taken == Taken::Shared {
            let own = self.take_out_mixed(blocks)?;
            self.let_go(own);
            return Ok(());
        }
        match self.waiting_for() {
            Some(epoch) => self.quarantine(blocks, epoch),
            None if taken == Taken::Planned && !blocks.is_empty() => {
                self.free_planned(blocks, &plan);
                self.give_back(plan.account, blocks.len() as u32);
            }
            None => self.free_detached(blocks, |account, count| self.give_back(account, count)),
        }
        Ok(())
    }

    /// Frees blocks that are off and the caller's, or quarantines them while steps are open. Only who took the last
    /// reference comes here, and looks for open steps after that: if a step was opened before, it is seen.
    fn let_go(&self, chain: Chain) {
        match self.waiting_for() {
            None => self.free_chain(chain),
            Some(epoch) => self.quarantine_chain(chain, epoch),
        }
    }

    /// Takes the exclusive blocks of a batch out and a reference from each shared one. Returns the blocks that are
    /// the caller's alone then. The handles were good when the plan was made.
    fn take_out_mixed(&self, blocks: &[BlockHandle]) -> Result<Chain> {
        if FAULT != faults::KEEP_PARTIAL {
            self.check_references(blocks)?;
        }
        let mut own = Own { taken: Chain::EMPTY, dropped: Chain::EMPTY };
        let mut done = 0;
        while done < blocks.len() {
            match self.take_out_mixed_run(&blocks[done..], &mut own) {
                Ok(len) => done += len,
                Err((within, error)) => {
                    if FAULT != faults::KEEP_PARTIAL {
                        self.undo(&blocks[..done + within], &own);
                    }
                    return Err(error);
                }
            }
        }
        if own.taken.is_empty() {
            return Ok(own.dropped);
        }
        self.epochs.link(own.taken.last, own.dropped.first);
        let last = if own.dropped.is_empty() { own.taken.last } else { own.dropped.last };
        Ok(Chain { first: own.taken.first, last })
    }

    /// The first run of a batch. On an error, also how many of its shared handles come before the bad one.
    fn take_out_mixed_run(
        &self,
        blocks: &[BlockHandle],
        own: &mut Own,
    ) -> std::result::Result<usize, (usize, Error)> {
        loop {
            let Found { run, len, .. } = self.run(blocks, None).map_err(|error| (0, error))?;
            let (members, exclusive) = (&blocks[..len], run.exclusive());
            self.check_members(members, run, Rule::Release).map_err(|error| (0, error))?;
            // As in `take_planned`.
            if exclusive != 0 && !self.groups.try_take_out(run.group as usize, run.seen, exclusive) {
                continue;
            }
            let is_exclusive = |block: &BlockHandle| place(block.id().0).1 & exclusive != 0;
            for block in members.iter().filter(|block| is_exclusive(block)) {
                self.chain(&mut own.taken, block.id().0);
            }
            for (i, &block) in members.iter().enumerate().filter(|(_, block)| !is_exclusive(block)) {
                self.drop_one(block, &mut own.dropped).map_err(|error| (i, error))?;
            }
            return Ok(len);
        }
    }

    /// Drops a reference of a shared block. Whose exchange drops the last one owns the block, and only he.
    fn drop_one(&self, block: BlockHandle, own: &mut Chain) -> Result<()> {
        let state = if FAULT == faults::TORN_REFERENCES {
            let next = dropped(self.state(block.id().0), block)?;
            std::thread::yield_now();
            self.states[block.id().0 as usize].store(next.pack(), Ordering::Release);
            next
        } else {
            self.exchange(block, |state| dropped(state, block))?
        };
        if state.kind == Kind::Dropped {
            let (group, bit) = place(block.id().0);
            self.groups.take_out_shared(group, bit);
            self.chain(own, block.id().0);
        }
        Ok(())
    }

    /// Gives back what a release took before it failed: another thread released the same references meanwhile.
    fn undo(&self, blocks: &[BlockHandle], own: &Own) {
        for id in self.chained(own.dropped) {
            let (group, bit) = place(id);
            let state = self.state(id);
            // Without references nobody can add or drop one, so the links stay ours. Release as in `claim`.
            let shared = State { kind: Kind::Shared, references: 0, ..state };
            self.states[id as usize].store(shared.pack(), Ordering::Release);
            self.groups.restore_shared(group, bit);
        }
        for &block in blocks {
            let (group, bit) = place(block.id().0);
            if self.groups.load(group).shared() & bit != 0 {
                // Fails for a block whose other holders let go of it meanwhile.
                let _ = self.exchange(block, |state| match state.kind {
                    Kind::Shared => Ok(State { references: state.references + 1, ..state }),
                    _ => Err(state.fault(block)),
                });
            }
        }
        for id in self.chained(own.taken) {
            let (group, bit) = place(id);
            self.groups.restore(group, bit);
        }
    }

    /// Checks that no shared block is named more often than it has references. Nothing has been dropped yet, so a
    /// batch with too many changes nothing.
    fn check_references(&self, blocks: &[BlockHandle]) -> Result<()> {
        let mut filter = [0u64; FILTER];
        for &block in blocks {
            let (group, bit) = place(block.id().0);
            if self.groups.load(group).shared() & bit == 0 {
                continue;
            }
            let hash = block.id().0.wrapping_mul(0x9e37_79b9) >> 20;
            let (word, bit) = (hash as usize / 64, 1u64 << (hash % 64));
            if filter[word] & bit != 0 {
                let state = self.state(block.id().0);
                if times(blocks, block) > state.references as usize {
                    return Err(state.error(block, HandleFault::OverRelease));
                }
            }
            filter[word] |= bit;
        }
        Ok(())
    }
}

/// How often a batch names a block.
fn times(blocks: &[BlockHandle], block: BlockHandle) -> usize {
    blocks.iter().filter(|other| other.id() == block.id()).count()
}

fn check_retainable(state: State, block: BlockHandle, more: usize) -> Result<()> {
    if state.generation != block.generation() || !state.is_referenced() {
        return Err(state.fault(block));
    }
    if state.references == 0 {
        return Err(state.error(block, HandleFault::OverRelease));
    }
    if state.references as usize + more > MAX_REFERENCES as usize {
        return Err(Error::invalid(format!(
            "block {} has {} references, {more} more would pass {MAX_REFERENCES}, the most there can be",
            block.id(),
            state.references
        )));
    }
    Ok(())
}

/// The state with a reference less.
fn dropped(state: State, block: BlockHandle) -> Result<State> {
    match state.references {
        _ if !state.is_referenced() => Err(state.fault(block)),
        0 => Err(state.error(block, HandleFault::OverRelease)),
        1 => Ok(State { kind: Kind::Dropped, references: 0, ..state }),
        more => Ok(State { references: more - 1, ..state }),
    }
}
