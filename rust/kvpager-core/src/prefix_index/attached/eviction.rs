//! Attached blocks go: by themselves, or with the blocks that they are attached to.

use super::NONE;
use crate::block_pool::StepEpoch;
use crate::ids::BlockHandle;
use crate::prefix_index::PrefixIndex;
use crate::prefix_index::evictor::Whose;

impl PrefixIndex {
    /// Evicts unused attached blocks, oldest first: those left behind, or those of use.
    pub(in crate::prefix_index) fn evict_attached(
        &self,
        whose: Whose,
        num_blocks: usize,
        is_of_use: bool,
    ) -> usize {
        let Some(attached) = self.attached.get() else { return 0 };
        self.evictor.in_pieces(num_blocks, |evictor, wanted| {
            let (mut state, mut total) = (attached.state(), 0);
            for index in 0..state.lists.len().min(evictor.lanes.len()) {
                let allowed = evictor.allowance(&self.pool, whose, index).min(wanted - total);
                for _ in 0..allowed {
                    let id = state.lists[index][usize::from(is_of_use)].oldest;
                    if id == NONE || !self.is_closed(state.entries[id as usize].fence) {
                        break;
                    }
                    self.withdraw(&mut state, id);
                    state.evict(id);
                    total += 1;
                }
            }
            (total > 0).then_some(total)
        })
    }

    pub(super) fn is_closed(&self, fence: Option<StepEpoch>) -> bool {
        fence.is_none_or(|epoch| self.pool.epoch_closed(epoch))
    }

    /// The first group's blocks, or homes, go: what is attached to them goes with them, or when its last user leaves it.
    /// Returns how many attached blocks went.
    pub(in crate::prefix_index) fn evict_homes(&self, blocks: &[BlockHandle]) -> usize {
        let Some(attached) = self.attached.get() else { return 0 };
        let mut total = 0;
        for piece in blocks.chunks(attached.piece()) {
            let mut state = attached.state();
            for (&first, group) in
                piece.iter().flat_map(|first| (0..attached.groups.len()).map(move |g| (first, g)))
            {
                let home = attached.home(first, group);
                let id = std::mem::replace(&mut state.homes[home], NONE);
                self.withdraw(&mut state, id);
                let Some(entry) = state.entries.get_mut(id as usize).filter(|_| id != NONE) else { continue };
                entry.home = NONE;
                if !entry.is_used() && self.is_closed(entry.fence) {
                    state.evict(id);
                    total += 1;
                }
            }
        }
        total
    }
}
