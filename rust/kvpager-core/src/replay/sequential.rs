//! Index and pool alone: one request at a time, look up, then insert its full prompt blocks.

use super::columns::Columns;
use super::tokens;
use crate::block_pool::{BlockPool, PoolConfig, Quota};
use crate::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope};
use crate::{AccountId, BlockHandle, Error, NamespaceId, Result};
use std::sync::Arc;

/// What a sequential replay counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequentialCounts {
    /// Requests.
    pub requests: u64,
    /// Requests whose prompt has more blocks than the pool: looked up, not inserted.
    pub too_long: u64,
    /// Full prompt blocks.
    pub lookup_blocks: u64,
    /// Of those, blocks that were there.
    pub hit_blocks: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
}

/// A replay that is comparable with any other cache, block for block.
pub struct SequentialReplay {
    pool: Arc<BlockPool>,
    index: Arc<PrefixIndex>,
    namespaces: Vec<(NamespaceId, AccountId)>,
    block_size: u32,
    hash_block: u32,
    counts: SequentialCounts,
    prompt: Vec<u32>,
    matched: Vec<BlockHandle>,
    fresh: Vec<BlockHandle>,
}

impl SequentialReplay {
    /// An empty cache of so many blocks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for sizes out of range.
    pub fn new(
        num_blocks: u32,
        block_size: u32,
        eviction: EvictionPolicy,
        hash_block: u32,
        tenants: &[String],
    ) -> Result<Self> {
        let index_config = IndexConfig { block_size, eviction };
        index_config.check_for(num_blocks)?;
        let defaults = PoolConfig { num_blocks, ..PoolConfig::default() };
        let max_accounts = defaults.max_accounts.max(tenants.len() as u32 + 4);
        let pool = BlockPool::new(PoolConfig { max_accounts, ..defaults })?;
        let index = PrefixIndex::new(Arc::clone(&pool), index_config)?;
        let namespace = |name: &String| {
            let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks })?;
            let scope = ShareScope::Private(name.clone());
            Ok((index.namespace(&scope, &Fingerprint::default(), account)?, account))
        };
        let namespaces = tenants.iter().map(namespace).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            namespaces,
            block_size,
            hash_block,
            counts: SequentialCounts::default(),
            prompt: Vec::new(),
            matched: Vec::new(),
            fresh: Vec::new(),
            pool,
            index,
        })
    }

    /// Runs a block of requests.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for bad columns; anything else is a bug.
    pub fn push(&mut self, columns: &Columns<'_>) -> Result<()> {
        columns.validate(self.namespaces.len() as u32)?;
        (0..columns.arrival.len()).try_for_each(|row| self.run(columns, row))
    }

    /// What was counted so far.
    #[must_use]
    pub fn counts(&self) -> SequentialCounts {
        self.counts
    }

    /// Most blocks held at once: those of one request.
    #[must_use]
    pub fn peak_held(&self) -> u64 {
        self.pool.stats().peak_held
    }

    fn run(&mut self, columns: &Columns<'_>, row: usize) -> Result<()> {
        let num_tokens = columns.prompt_tokens[row];
        let (namespace, account) = self.namespaces[columns.tenant[row] as usize];
        self.prompt.clear();
        tokens::prompt(num_tokens, self.hash_block, columns.ids(row), self.counts.requests, &mut self.prompt);
        let num_full = (num_tokens / self.block_size) as usize;
        self.prompt.truncate(num_full * self.block_size as usize);
        self.matched.clear();
        let mut pin = self.index.match_whole(namespace, &self.prompt, &mut self.matched)?;
        self.counts.requests += 1;
        self.counts.prompt_tokens += u64::from(num_tokens);
        self.counts.lookup_blocks += num_full as u64;
        self.counts.hit_blocks += self.matched.len() as u64;
        let num_new = num_full - self.matched.len();
        if num_full > self.pool.num_blocks() as usize {
            self.counts.too_long += 1;
            return Ok(());
        }
        self.fresh.clear();
        self.fresh.resize(num_new, BlockHandle::from_bits(0));
        self.allocate(account)?;
        let from = self.matched.len() * self.block_size as usize;
        let extended = self.index.extend(&mut pin, &self.prompt[from..], &mut self.fresh)?;
        if extended.num_indexed < num_new {
            self.pool.release(&self.fresh[extended.num_indexed..])?;
        }
        Ok(())
    }

    fn allocate(&mut self, account: AccountId) -> Result<()> {
        loop {
            match self.pool.allocate(account, &mut self.fresh) {
                Err(Error::NeedsReclaim { needed, free, cached }) => {
                    let missing = u32::try_from(needed.saturating_sub(free)).unwrap_or(u32::MAX);
                    if self.index.evict(missing) == 0 {
                        return Err(Error::NeedsReclaim { needed, free, cached });
                    }
                }
                other => return other,
            }
        }
    }
}
