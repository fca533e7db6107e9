//! Native calls of the prefix index. Blocks of 16, sequences of 32 shared and 32 own blocks; each row names the
//! blocks that are resident. `cargo bench -p kvpager-benches --bench prefix_index`.

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvpager_core::NamespaceId;
use kvpager_core::block_pool::{BlockPool, PoolConfig, Quota};
use kvpager_core::prefix_index::{EvictionPolicy, Fingerprint, IndexConfig, PrefixIndex, ShareScope};
use std::hint::black_box;
use std::sync::Arc;

const BLOCK_SIZE: usize = 16;
const SHARED: usize = 32;
const OWN: usize = 32;
const FAMILY: usize = 32;
const EXPECT: &str = "there is room in the pool";

struct World {
    index: Arc<PrefixIndex>,
    namespace: NamespaceId,
    known: Vec<Vec<u32>>,
    random: u64,
}

impl World {
    fn new(resident: usize, eviction: EvictionPolicy) -> Self {
        let num_blocks = (2 * resident + 65_536) as u32;
        let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).expect(EXPECT);
        let account = pool.add_account(Quota { guaranteed: 0, limit: num_blocks }).expect(EXPECT);
        let index = PrefixIndex::new(pool, IndexConfig { block_size: BLOCK_SIZE as u32, eviction });
        let index = index.expect(EXPECT);
        let scope = ShareScope::Private("bench".into());
        let namespace = index.namespace(&scope, &Fingerprint::default(), account).expect(EXPECT);
        let mut world = Self { index, namespace, known: Vec::new(), random: 0x2545_f491_4f6c_dd1d };
        let count = resident / OWN;
        world.known = world.prompts(count);
        for prompt in &world.known {
            world.insert(prompt);
        }
        world
    }

    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Prompts that share their first half in families.
    fn prompts(&mut self, count: usize) -> Vec<Vec<u32>> {
        let mut prompts: Vec<Vec<u32>> = Vec::with_capacity(count);
        for i in 0..count {
            let mut prompt = match i % FAMILY {
                0 => Vec::new(),
                before => prompts[i - before][..SHARED * BLOCK_SIZE].to_vec(),
            };
            while prompt.len() < (SHARED + OWN) * BLOCK_SIZE {
                prompt.push((self.draw() >> 33) as u32);
            }
            prompts.push(prompt);
        }
        prompts
    }

    fn insert(&self, prompt: &[u32]) {
        let mut blocks = Vec::with_capacity(SHARED + OWN);
        drop(self.index.insert_prefix(self.namespace, prompt, &mut blocks).expect(EXPECT));
    }
}

fn matches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match + pin + unpin, 64 blocks");
    group.throughput(Throughput::Elements((SHARED + OWN) as u64));
    for resident in [10_000, 100_000] {
        let mut world = World::new(resident, EvictionPolicy::Lru);
        let mut blocks = Vec::with_capacity(SHARED + OWN);
        group.bench_function(BenchmarkId::from_parameter(resident), |bencher| {
            bencher.iter(|| {
                let place = world.draw() as usize % world.known.len();
                blocks.clear();
                let found = world.index.match_whole(world.namespace, &world.known[place], &mut blocks);
                black_box(found.expect(EXPECT));
            });
        });
    }
    group.finish();
}

fn inserts(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("insert + release of 32 new blocks below 32 shared");
    group.throughput(Throughput::Elements(OWN as u64));
    for resident in [10_000, 100_000] {
        let mut world = World::new(resident, EvictionPolicy::Lru);
        group.bench_function(BenchmarkId::from_parameter(resident), |bencher| {
            let mut fresh = world.prompts(512);
            let heads: Vec<Vec<u32>> = world.known.iter().take(512).cloned().collect();
            for (prompt, head) in fresh.iter_mut().zip(heads.iter().cycle()) {
                prompt[..SHARED * BLOCK_SIZE].copy_from_slice(&head[..SHARED * BLOCK_SIZE]);
            }
            let mut serial = 0u32;
            let next = || {
                serial += 1;
                let mut prompt = fresh[serial as usize % fresh.len()].clone();
                prompt[SHARED * BLOCK_SIZE] = serial;
                prompt
            };
            bencher.iter_batched(next, |prompt| world.insert(&prompt), BatchSize::SmallInput);
        });
    }
    group.finish();
}

fn evictions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("evict 32 blocks and put 32 back");
    for (name, eviction) in [("lru", EvictionPolicy::Lru), ("learned", EvictionPolicy::Learned)] {
        let mut world = World::new(100_000, eviction);
        let mut serial = 0u32;
        let mut prompt = world.prompts(1).remove(0);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                black_box(world.index.evict(OWN as u32));
                serial += 1;
                prompt[SHARED * BLOCK_SIZE] = serial;
                world.insert(&prompt);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, matches, inserts, evictions);
criterion_main!(benches);
