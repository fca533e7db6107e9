//! Freeing blocks that are off and the caller's alone, and the lists of such blocks.

use super::epochs::NIL;
use super::groups::{WIDTH, place};
use super::state::State;
use super::taking::Plan;
use super::{BlockPool, faults};
use crate::ids::{AccountId, BlockHandle};
use crate::sync::Ordering;

/// Blocks that are off and one call's alone, linked as those of an open step are.
#[derive(Clone, Copy)]
pub(super) struct Chain {
    pub(super) first: u32,
    pub(super) last: u32,
}

impl Chain {
    pub(super) const EMPTY: Self = Self { first: NIL, last: NIL };

    pub(super) const fn is_empty(self) -> bool {
        self.first == NIL
    }
}

/// Blocks on their way to being free: neighbours in one group are freed by one exchange, the capacity of one
/// account in a row is given back by one.
pub(super) struct Returning {
    group: usize,
    mask: u64,
    pub(super) account: AccountId,
    pub(super) count: u32,
}

impl Returning {
    pub(super) const NONE: Self = Self { group: 0, mask: 0, account: AccountId(0), count: 0 };
}

impl<const FAULT: u8> BlockPool<FAULT> {
    /// Puts a block in front of a chain.
    pub(super) fn chain(&self, chain: &mut Chain, block: u32) {
        self.epochs.link(block, chain.first);
        if chain.is_empty() {
            chain.last = block;
        }
        chain.first = block;
    }

    /// The blocks of a chain. Each link is read before its block is handed over. A block is in one chain once; a
    /// planted fault can close a chain to a ring, which ends here all the same.
    pub(super) fn chained(&self, chain: Chain) -> impl Iterator<Item = u32> {
        let mut block = chain.first;
        let links = std::iter::from_fn(move || {
            let this = block;
            block = if this == NIL { NIL } else { self.epochs.next(this) };
            (this != NIL).then_some(this)
        });
        links.take(self.states.len())
    }

    /// Frees a block that is off and the caller's, without its capacity.
    #[inline]
    pub(super) fn free_one(&self, block: BlockHandle) {
        let (group, bit) = place(block.id().0);
        // Release as in `claim`; the block itself is published by `free` below.
        self.states[block.id().0 as usize].store(State::freed::<FAULT>(block.to_bits()), Ordering::Release);
        self.groups.free(group, bit);
    }

    /// Frees what was taken out as planned, without its capacity.
    pub(super) fn free_planned(&self, blocks: &[BlockHandle], plan: &Plan) {
        if plan.runs.len() > blocks.len() / 8 {
            // Short runs: one loop over all costs less than the end of a loop for each.
            self.mark_freed(blocks);
        } else {
            let mut rest = blocks;
            for run in &plan.runs {
                let (members, others) = rest.split_at(run.len());
                rest = others;
                let Some(range) = run.range() else {
                    self.mark_freed(members);
                    continue;
                };
                let cells = &self.members(run.group as usize)[range];
                for (block, cell) in members.iter().zip(cells) {
                    cell.store(State::freed::<FAULT>(block.to_bits()), Ordering::Release);
                }
            }
        }
        self.groups.free_all(plan.runs.iter().map(|run| (run.group as usize, run.mask())));
    }

    /// Writes the words of blocks that are off and the caller's, and about to be freed.
    fn mark_freed(&self, blocks: &[BlockHandle]) {
        let states = &*self.states;
        for block in blocks {
            // A handle has its block's generation. Release as in `claim`; the block is published by its group.
            states[block.id().0 as usize].store(State::freed::<FAULT>(block.to_bits()), Ordering::Release);
        }
    }

    /// Frees blocks that are off and the caller's, each once. `give` gets runs of one account after their blocks
    /// are published.
    pub(super) fn free_detached(&self, blocks: &[BlockHandle], mut give: impl FnMut(AccountId, u32)) {
        let (mut account, mut count) = (AccountId(0), 0);
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            // Relaxed: the block is the caller's alone.
            let of = State::account_of(self.states[first.id().0 as usize].load(Ordering::Relaxed));
            if of != account && count > 0 {
                give(account, std::mem::take(&mut count));
            }
            account = of;
            if FAULT == faults::EARLY_PERMIT {
                give(account, 1);
                std::thread::yield_now();
            }
            let freed = self.free_run(rest, account, FAULT == faults::EARLY_PERMIT);
            count += if FAULT == faults::EARLY_PERMIT { 0 } else { freed as u32 };
            rest = &rest[freed..];
        }
        if count > 0 {
            give(account, count);
        }
    }

    /// Frees the first blocks of a batch that are in one group and of one account, and returns how many.
    fn free_run(&self, blocks: &[BlockHandle], account: AccountId, only_one: bool) -> usize {
        let (group, _) = place(blocks[0].id().0);
        let (first, members) = ((group * WIDTH) as u32, self.members(group));
        let (mut mask, mut count) = (0, 0);
        for block in blocks {
            let offset = block.id().0.wrapping_sub(first);
            let Some(cell) = members.get(offset as usize) else { break };
            if only_one && count == 1 {
                break;
            }
            // Relaxed: the block is the caller's alone.
            let word = cell.load(Ordering::Relaxed);
            if State::account_of(word) != account {
                break;
            }
            // Release as in `claim`; the block itself is published by `free` below.
            cell.store(State::freed::<FAULT>(word), Ordering::Release);
            mask |= 1 << offset;
            count += 1;
        }
        self.groups.free(group, mask);
        count
    }

    /// Frees the blocks of a chain, and gives their capacity back.
    pub(super) fn free_chain(&self, chain: Chain) {
        let mut run = Returning::NONE;
        for block in self.chained(chain) {
            // Relaxed: the block is the caller's alone.
            let state = State::unpack(self.states[block as usize].load(Ordering::Relaxed));
            let generation = state.next_generation::<FAULT>();
            self.bring_back(&mut run, block, State { generation, ..state }, |run| {
                self.give_back(run.account, run.count);
            });
        }
        self.finish(&mut run, |run| self.give_back(run.account, run.count));
    }

    /// Frees a block in the generation that `state` has. `give` gets what was collected when another account's
    /// block comes.
    pub(super) fn bring_back(
        &self,
        run: &mut Returning,
        block: u32,
        state: State,
        give: impl Fn(&Returning),
    ) {
        let (group, bit) = place(block);
        if group != run.group || state.account != run.account {
            self.finish_group(run);
            run.group = group;
        }
        if state.account != run.account {
            self.finish(run, give);
            run.account = state.account;
        }
        // Release as in `claim`.
        self.states[block as usize].store(State::free(state.generation).pack(), Ordering::Release);
        run.mask |= bit;
        run.count += 1;
    }

    fn finish_group(&self, run: &mut Returning) {
        if run.mask != 0 {
            self.groups.free(run.group, std::mem::take(&mut run.mask));
        }
    }

    /// Publishes what was collected and hands it to `give`.
    pub(super) fn finish(&self, run: &mut Returning, give: impl Fn(&Returning)) {
        self.finish_group(run);
        if run.count > 0 {
            give(run);
            run.count = 0;
        }
    }

    /// Gives capacity and free permits of published blocks back.
    #[inline]
    pub(super) fn give_back(&self, account: AccountId, count: u32) {
        let given = self.accounts.give::<FAULT>(account, count, count);
        debug_assert!(given.is_ok() || FAULT != faults::NONE, "{given:?}");
    }
}
