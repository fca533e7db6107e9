//! An index with prompts in it, as the benchmarks of the prefix index use it.

use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope};
use kvpager_core::{BlockHandle, NamespaceId};
use std::hint::black_box;
use std::sync::Arc;

/// Tokens in a block.
pub const BLOCK_SIZE: usize = 16;
/// Blocks that a family of prompts shares.
pub const SHARED: usize = 32;
/// Blocks of a prompt's own part, unless a row says otherwise.
pub const OWN: usize = 32;
/// Prompts in a family.
pub const FAMILY: usize = 32;
/// Policies by name.
pub const POLICIES: [(&str, EvictionPolicy); 3] =
    [("lru", EvictionPolicy::Lru), ("learned", EvictionPolicy::Learned), ("clock", EvictionPolicy::Clock)];
/// Why nothing here can fail.
pub const EXPECT: &str = "there is room in the pool";

/// An index, and the prompts that are in it.
pub struct World {
    /// The index.
    pub index: Arc<PrefixIndex>,
    /// Where the prompts are.
    pub namespace: NamespaceId,
    /// The prompts.
    pub known: Vec<Vec<u32>>,
    /// Draws what is next.
    pub random: Random,
}

/// Xorshift: repeatable, and costs next to nothing beside a call.
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.draw() >> 11) as usize % bound
    }

    /// Appends tokens.
    pub fn tokens(&mut self, count: usize, out: &mut Vec<u32>) {
        out.extend((0..count).map(|_| (self.draw() >> 33) as u32));
    }
}

impl World {
    /// An index without prompts.
    #[must_use]
    pub fn empty(num_blocks: usize, eviction: EvictionPolicy) -> Self {
        let num_blocks = num_blocks as u32;
        let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).expect(EXPECT);
        let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).expect(EXPECT);
        let index = PrefixIndex::new(pool, IndexConfig { block_size: BLOCK_SIZE as u32, eviction });
        let index = index.expect(EXPECT);
        let scope = ShareScope::Private("bench".into());
        let namespace = index.namespace(&scope, &Fingerprint::default(), account).expect(EXPECT);
        Self { index, namespace, known: Vec::new(), random: Random(0x2545_f491_4f6c_dd1d) }
    }

    /// About `resident` blocks, in sequences whose own part is `own` blocks.
    #[must_use]
    pub fn new(resident: usize, own: usize, eviction: EvictionPolicy) -> Self {
        let mut world = Self::empty(2 * resident + 65_536, eviction);
        // A family has its shared blocks once.
        let count = resident * FAMILY / (FAMILY * own + SHARED);
        world.known = world.prompts(count, own);
        for prompt in &world.known {
            world.insert(prompt);
        }
        world
    }

    /// Prompts that share their first blocks in families.
    pub fn prompts(&mut self, count: usize, own: usize) -> Vec<Vec<u32>> {
        let mut prompts: Vec<Vec<u32>> = Vec::with_capacity(count);
        for i in 0..count {
            let mut prompt = Vec::with_capacity((SHARED + own) * BLOCK_SIZE);
            match i % FAMILY {
                0 => self.random.tokens(SHARED * BLOCK_SIZE, &mut prompt),
                before => prompt.extend_from_slice(&prompts[i - before][..SHARED * BLOCK_SIZE]),
            }
            self.random.tokens(own * BLOCK_SIZE, &mut prompt);
            prompts.push(prompt);
        }
        prompts
    }

    /// A new prompt: the shared blocks of a known one, and `own` blocks that are new.
    pub fn continued(&mut self, own: usize) -> Vec<u32> {
        let head = self.random.below(self.known.len());
        let mut prompt = self.known[head][..SHARED * BLOCK_SIZE].to_vec();
        self.random.tokens(own * BLOCK_SIZE, &mut prompt);
        prompt
    }

    /// Makes a prompt resident and lets it go.
    pub fn insert(&self, prompt: &[u32]) {
        let mut blocks = Vec::with_capacity(prompt.len() / BLOCK_SIZE);
        drop(self.index.insert_prefix(self.namespace, prompt, &mut blocks).expect(EXPECT));
    }

    /// Matches a prompt and lets it go.
    #[inline]
    pub fn find(&self, prompt: &[u32], blocks: &mut Vec<BlockHandle>) {
        blocks.clear();
        black_box(self.index.match_whole(self.namespace, prompt, blocks).expect(EXPECT));
    }
}
