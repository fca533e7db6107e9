//! The forecast over branch sets against a model that counts block by block.

use super::*;
use crate::block_pool::{BlockPool, PoolConfig};
use crate::ids::SequenceId;
use crate::prefix_index::{EvictionPolicy, IndexConfig, PrefixIndex};
use crate::scheduler::policy::HORIZONS;
use crate::scheduler::{AdmissionPolicy, Request, Scheduler, SchedulerConfig, Tenant, TenantConfig};
use hashbrown::HashMap;
use proptest::prelude::*;
use std::sync::Arc;

const BLOCK_SIZE: u32 = 4;

/// What stands for a block: itself, or the tokens up to its end if it is to be shared when it is there.
#[derive(PartialEq, Eq, Hash)]
enum Stored {
    Block(BlockHandle),
    Tokens(Vec<u32>),
}

/// Whoever has some blocks, by block: (age, most tokens to come).
#[derive(Default)]
struct Model {
    users: HashMap<Stored, Vec<(u32, u32)>>,
    /// What is nobody else's: (blocks of now, age, most).
    own: Vec<(f32, u32, u32)>,
}

impl Model {
    /// Adds a sequence whose first blocks are `shared`, of `held` blocks in all.
    fn add(&mut self, shared: Vec<Stored>, held: f32, age: u32, most: u32) {
        self.own.push((held - shared.len() as f32, age, most));
        for block in shared {
            self.users.entry(block).or_default().push((age, most));
        }
    }

    /// Blocks at each horizon, in the mean, and now.
    fn blocks(&self, lengths: &OutputLengths) -> (Vec<f32>, f32) {
        let goes_on = |k: usize, (age, most): (u32, u32)| {
            if HORIZONS[k] < most as f32 { lengths.survival(age)[k] } else { 0.0 }
        };
        let mean = |k: usize| {
            let is_there = |users: &Vec<(u32, u32)>| {
                1.0 - users.iter().map(|&user| 1.0 - goes_on(k, user)).product::<f32>()
            };
            let grown = HORIZONS[k] / BLOCK_SIZE as f32;
            let own = self.own.iter().map(|&(held, age, most)| (held + grown) * goes_on(k, (age, most)));
            self.users.values().map(is_there).sum::<f32>() + own.sum::<f32>()
        };
        let now = self.users.len() as f32 + self.own.iter().map(|own| own.0).sum::<f32>();
        ((0..HORIZONS.len()).map(mean).collect(), now)
    }
}

struct Engine {
    scheduler: Scheduler,
    tenant: Arc<Tenant>,
    seed: u32,
    live: Vec<SequenceId>,
}

impl Engine {
    fn new(num_blocks: u32, has_index: bool, policy: AdmissionPolicy) -> Self {
        let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
        let index = has_index.then(|| {
            let index = IndexConfig { block_size: BLOCK_SIZE, eviction: EvictionPolicy::Lru };
            PrefixIndex::new(Arc::clone(&pool), index).unwrap()
        });
        let config = SchedulerConfig {
            block_size: BLOCK_SIZE,
            max_batch_tokens: 32,
            max_running: 24,
            max_model_tokens: 256,
            policy,
            ..SchedulerConfig::default()
        };
        let scheduler = Scheduler::new(pool, index, config).unwrap();
        let tenant = scheduler.add_tenant(&TenantConfig::new("a", num_blocks)).unwrap();
        Self { scheduler, tenant, seed: 0, live: Vec::new() }
    }

    fn submit(&mut self, length: u32, max_tokens: u32, n: u32) -> Option<SequenceId> {
        self.seed += 1;
        let prompt = (0..length).map(|i| self.seed * 1000 + i).collect();
        let request = Request { n, ..Request::new(Arc::clone(&self.tenant), prompt, max_tokens) };
        let id = self.scheduler.submit(request).ok()?;
        self.live.extend((0..u64::from(n)).map(|i| SequenceId(id.0 + i)));
        Some(id)
    }

    /// A step whose samples all differ.
    fn turn(&mut self) {
        let batch = self.scheduler.step(0).unwrap();
        let arrays = &batch.arrays;
        let (mut token_start, mut tokens) = (vec![0], Vec::new());
        for range in arrays.query_start.windows(2) {
            for _ in arrays.sample_rows.iter().filter(|&&row| (range[0]..range[1]).contains(&row)) {
                self.seed += 1;
                tokens.push(self.seed as i32);
            }
            token_start.push(tokens.len() as i32);
        }
        self.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
    }

    /// Every block of what runs, one by one.
    fn model(core: &Core) -> Model {
        let mut model = Model::default();
        for sequence in &core.running {
            for known in sequence.known() {
                let (length, n) = (known.tokens.len(), known.request.n);
                let age = length as u32 - known.prompt_tokens;
                for _ in 0..n {
                    // Of one that is to split: what it has, and what it will have by then.
                    let full = match n {
                        1 => sequence.num_computed,
                        _ => length as u32,
                    } / BLOCK_SIZE;
                    let stored = |column: usize| match sequence.blocks.get(column) {
                        Some(&block) => Stored::Block(block),
                        None => Stored::Tokens(known.tokens[..(column + 1) * BLOCK_SIZE as usize].to_vec()),
                    };
                    let shared = (0..full as usize).map(stored).collect();
                    let held = length as f32 / BLOCK_SIZE as f32;
                    model.add(shared, held, age, known.request.max_tokens - age);
                }
            }
        }
        model
    }

    fn check(&self) {
        let core = self.scheduler.enter().unwrap();
        let lengths = core.compartments[0].lengths.of(self.tenant.index);
        let (mean, now) = Self::model(&core).blocks(lengths);
        let (own_mean, own_now) = core.growth_of_running(0).blocks();
        assert!((now - own_now).abs() < 0.01 + now * 1e-4, "{own_now} blocks now, {now} one by one");
        for (k, (own, mean)) in own_mean.iter().zip(&mean).enumerate() {
            let near = (own - mean).abs() < 0.05 + mean * 1e-3;
            assert!(near, "{own} blocks after {} tokens, {mean} one by one", HORIZONS[k]);
        }
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Submit { length: u32, max_tokens: u32, n: u32 },
    Fork { which: prop::sample::Index, count: u32 },
    Reorder { which: prop::sample::Index, shift: usize },
    Abort { which: prop::sample::Index },
    Turns(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    let any = any::<prop::sample::Index>;
    prop_oneof![
        2 => (1..40u32, 4..60u32, 1..5u32)
            .prop_map(|(length, max_tokens, n)| Operation::Submit { length, max_tokens, n }),
        2 => (any(), 1..4u32).prop_map(|(which, count)| Operation::Fork { which, count }),
        3 => (any(), 0..4usize).prop_map(|(which, shift)| Operation::Reorder { which, shift }),
        1 => any().prop_map(|which| Operation::Abort { which }),
        4 => (1..9u32).prop_map(Operation::Turns),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever samples, forks and beams share is counted once, as long as one of them is there; copies of last blocks
    /// and what each grows by are counted for each.
    #[test]
    fn the_forecast_counts_what_is_stored(
        has_index in any::<bool>(),
        operations in prop::collection::vec(operation(), 1..40),
    ) {
        // Nothing is ever short: what is shared is what the branches did.
        let policy = AdmissionPolicy::from_name("forecast").unwrap();
        let mut engine = Engine::new(4096, has_index, policy);
        for operation in operations {
            match operation {
                Operation::Submit { length, max_tokens, n } => {
                    engine.submit(length, max_tokens, n);
                }
                Operation::Fork { which, count } if !engine.live.is_empty() => {
                    let id = engine.live[which.index(engine.live.len())];
                    engine.live.extend(engine.scheduler.fork(id, count).unwrap_or_default());
                }
                Operation::Reorder { which, shift } if !engine.live.is_empty() => {
                    let id = engine.live[which.index(engine.live.len())];
                    let set = engine.scheduler.enter().unwrap().sets.members(id);
                    let parents: Vec<_> = (0..set.len()).map(|i| set[(i / 2 + shift) % set.len()]).collect();
                    let tokens: Vec<i32> = (0..set.len() as i32).map(|i| 500_000 + i).collect();
                    // Refused unless all of them have just sampled.
                    let _ = engine.scheduler.reorder(&set, &parents, &tokens);
                }
                Operation::Abort { which } if !engine.live.is_empty() => {
                    let _ = engine.scheduler.abort(engine.live[which.index(engine.live.len())]);
                }
                Operation::Turns(count) => (0..count).for_each(|_| {
                    engine.turn();
                    engine.check();
                }),
                _ => {}
            }
            engine.check();
        }
    }
}
