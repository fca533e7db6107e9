//! Making a whole prefix resident in one call.

use super::{ChainPin, Extended, Pin, PrefixIndex, ScopeChain};
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
        let mut pin = self.match_whole(namespace, tokens, blocks)?;
        let num_matched = pin.num_blocks();
        let extend = |tokens: &[u32], new: &mut [BlockHandle]| self.extend(&mut pin, tokens, new);
        self.fill(namespace, tokens, num_matched, blocks, extend)?;
        Ok((pin, num_matched))
    }

    /// [`PrefixIndex::insert_prefix`] over a chain: what no scope has is inserted in the most private one.
    ///
    /// # Errors
    /// As [`PrefixIndex::insert_prefix`].
    pub fn insert_chain(
        self: &Arc<Self>,
        chain: &ScopeChain,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<(ChainPin, usize)> {
        let mut pin = self.match_chain_whole(chain, tokens, blocks)?;
        let num_matched = pin.num_blocks();
        let extend = |tokens: &[u32], new: &mut [BlockHandle]| self.extend_chain(&mut pin, tokens, new);
        self.fill(chain.last(), tokens, num_matched, blocks, extend)?;
        Ok((pin, num_matched))
    }

    /// [`PrefixIndex::insert_prefix`] in a public namespace, under its own quota: the operator's call.
    ///
    /// # Errors
    /// As [`PrefixIndex::insert_prefix`]; `InvalidArgument` if the namespace is not public.
    pub fn publish_prefix(
        self: &Arc<Self>,
        namespace: NamespaceId,
        tokens: &[u32],
        blocks: &mut Vec<BlockHandle>,
    ) -> Result<(Pin, usize)> {
        self.check_public(namespace)?;
        let mut pin = self.match_whole(namespace, tokens, blocks)?;
        let num_matched = pin.num_blocks();
        let publish = |tokens: &[u32], new: &mut [BlockHandle]| self.publish(&mut pin, tokens, new);
        self.fill(namespace, tokens, num_matched, blocks, publish)?;
        Ok((pin, num_matched))
    }

    /// Allocates what is missing of `tokens` beyond the last `num_matched` of `blocks`, and inserts it. On an
    /// error `blocks` loses those too.
    fn fill(
        self: &Arc<Self>,
        namespace: NamespaceId,
        tokens: &[u32],
        num_matched: usize,
        blocks: &mut Vec<BlockHandle>,
        insert: impl FnOnce(&[u32], &mut [BlockHandle]) -> Result<Extended>,
    ) -> Result<()> {
        let start = blocks.len() - num_matched;
        let block_size = self.config.block_size as usize;
        let num_blocks = tokens.len() / block_size;
        blocks.resize(start + num_blocks, BlockHandle::new(0, BlockId(0)));
        let new = &mut blocks[start + num_matched..];
        let account = self.namespaces.get(namespace)?.account;
        let tokens = &tokens[num_matched * block_size..num_blocks * block_size];
        let inserted = self.allocate(account, new).and_then(|()| {
            let done = insert(tokens, new);
            let num_indexed = done.as_ref().map_or(0, |done| done.num_indexed);
            if num_indexed < new.len() {
                self.pool.release(&new[num_indexed..])?;
            }
            done.map(|_| num_indexed)
        });
        blocks.truncate(start + inserted.as_ref().map_or(0, |num_indexed| num_matched + num_indexed));
        inserted.map(|_| ())
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
