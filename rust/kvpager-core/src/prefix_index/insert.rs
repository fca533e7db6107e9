//! Making a whole prefix resident in one call.

use super::{Pin, PrefixIndex};
use crate::block_pool::Reclaim;
use crate::error::{Error, Result};
use crate::ids::{AccountId, BlockHandle, BlockId, NamespaceId};
use std::sync::Arc;

impl PrefixIndex {
    /// Pins every whole block of `tokens`: what is resident is matched, the rest is allocated (evicting cached
    /// blocks where free ones are short) and inserted. Appends the blocks to `blocks`, first to last, and returns
    /// the pin and how many blocks were resident.
    ///
    /// For replays, warming and publishing, where content is written before anybody can match it; a scheduler
    /// allocates first and inserts when the content is there.
    ///
    /// # Errors
    /// `OutOfBlocks`, `OverQuota` or `NeedsReclaim` if there is no room: nothing is pinned or inserted.
    pub fn insert_prefix(
        self: &Arc<Self>,
        namespace: NamespaceId,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<(Pin, usize)> {
        let start = blocks.len();
        let mut pin = self.match_whole(namespace, tokens, blocks)?;
        let num_matched = pin.num_blocks();
        let block_size = self.config.block_size as usize;
        let num_blocks = tokens.len() / block_size;
        blocks.resize(start + num_blocks, BlockHandle::new(0, BlockId(0)));
        let new = &mut blocks[start + num_matched..];
        let account = self.namespaces.get(namespace)?.account;
        let inserted = self.allocate(account, new).and_then(|()| {
            let tokens = &tokens[num_matched * block_size..num_blocks * block_size];
            let done = self.extend(&mut pin, tokens, new)?;
            self.pool.release(&new[done.num_indexed..])
        });
        blocks.truncate(start + inserted.as_ref().map_or(0, |()| pin.num_blocks()));
        inserted.map(|()| (pin, num_matched))
    }

    /// Allocates, evicting as many cached blocks as are missing.
    fn allocate(&self, account: AccountId, out: &mut [BlockHandle]) -> Result<()> {
        self.make_room(account, out.len() as u32)?;
        loop {
            match self.pool.allocate(account, out) {
                Err(Error::NeedsReclaim { needed, free, cached }) => {
                    let missing = needed.saturating_sub(free).max(1).min(u64::from(u32::MAX)) as u32;
                    if self.reclaim(account, missing) == 0 {
                        return Err(Error::NeedsReclaim { needed, free, cached });
                    }
                }
                done => return done,
            }
        }
    }
}
