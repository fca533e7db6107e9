//! What is kept, against a list that says it in the plainest way.

mod support;

use kvpager_core::SequenceId;
use kvpager_core::scheduler::{Request, Retention, Tenant};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use support::{Engine, config, family_prompt, request, retention};

const BLOCK_SIZE: usize = 2;

#[derive(Clone, Debug)]
enum Operation {
    Submit {
        tenant: usize,
        family: u32,
        shared: u32,
        own: u32,
        max_tokens: u32,
        retention: Option<Retention>,
    },
    Turns(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    let retention = prop::option::weighted(0.8, retention(prop::option::weighted(0.8, 1..25u64), 14, -1..2));
    let submit = (0..2usize, 0..2u32, 0..9u32, 1..4u32, 1..4u32, retention).prop_map(
        |(tenant, family, shared, own, max_tokens, retention)| Operation::Submit {
            tenant,
            family,
            shared,
            own,
            max_tokens,
            retention,
        },
    );
    prop_oneof![3 => submit, 2 => (1..6u32).prop_map(Operation::Turns)]
}

/// A prefix that is kept, as its tokens.
#[derive(Debug)]
struct Kept {
    tokens: Vec<u32>,
    priority: i32,
    since: u64,
    number: usize,
    end: Option<u64>,
}

/// What one tenant keeps.
#[derive(Debug, Default)]
struct Model {
    kept: Vec<Kept>,
    next: usize,
}

impl Model {
    fn num_blocks(&self) -> usize {
        let ends =
            |kept: &Kept| (1..=kept.tokens.len() / BLOCK_SIZE).map(|n| n * BLOCK_SIZE).collect::<Vec<_>>();
        let blocks: HashSet<&[u32]> =
            self.kept.iter().flat_map(|kept| ends(kept).into_iter().map(|end| &kept.tokens[..end])).collect();
        blocks.len()
    }

    fn pass(&mut self, step: u64) {
        self.kept.retain(|kept| kept.end.is_none_or(|end| end > step));
    }

    fn keep(&mut self, tokens: &[u32], retention: Retention, step: u64, bound: usize) {
        let whole = tokens.len() / BLOCK_SIZE;
        let asked = retention.num_tokens.map_or(whole, |asked| (asked as usize).div_ceil(BLOCK_SIZE));
        let tokens = tokens[..asked.min(whole).min(bound) * BLOCK_SIZE].to_vec();
        if tokens.is_empty() {
            return;
        }
        let end = retention.limit.steps.map(|steps| step + steps);
        let mut new = Kept { tokens, priority: retention.priority, since: step, number: self.next, end };
        self.next += 1;
        let is_like = |old: &Kept| old.tokens == new.tokens && old.end.is_some() == new.end.is_some();
        if let Some(place) = self.kept.iter().position(is_like) {
            let old = self.kept.remove(place);
            new.priority = new.priority.max(old.priority);
            new.end = new.end.max(old.end);
        }
        self.kept.push(new);
        while self.num_blocks() > bound {
            let first = (0..self.kept.len()).min_by_key(|&i| {
                let kept = &self.kept[i];
                (kept.priority, kept.since, kept.number)
            });
            self.kept.remove(first.expect("more blocks than the bound"));
        }
    }
}

/// The model of the world: who asked for what.
type Asked = HashMap<SequenceId, (usize, Vec<u32>, Option<Retention>)>;

fn turn(engine: &mut Engine, asked: &mut Asked, models: &mut [Model], bounds: [u32; 2]) {
    let last = engine.scheduler.stats().steps;
    models.iter_mut().for_each(|model| model.pass(last));
    engine.turn();
    let mut ended: Vec<SequenceId> =
        asked.keys().copied().filter(|id| engine.finished.contains_key(id)).collect();
    ended.sort_unstable();
    for id in ended {
        let (tenant, mut tokens, retention) = asked.remove(&id).expect("known");
        tokens.extend(&engine.outputs[&id]);
        // The last token is returned and never computed.
        tokens.pop();
        if let Some(retention) = retention {
            models[tenant].keep(&tokens, retention, last + 1, bounds[tenant] as usize);
        }
    }
}

fn check(
    engine: &Engine,
    tenants: &[Arc<Tenant>],
    models: &[Model],
    is_idle: bool,
) -> Result<(), TestCaseError> {
    let counts: Vec<u64> = models.iter().map(|model| model.num_blocks() as u64).collect();
    let own: Vec<u64> = tenants.iter().map(|tenant| tenant.num_kept_blocks()).collect();
    prop_assert_eq!(own, counts.clone(), "{:?}", models);
    let stats = engine.scheduler.stats();
    prop_assert_eq!(stats.num_retained as usize, models.iter().map(|model| model.kept.len()).sum::<usize>());
    prop_assert_eq!(stats.num_kept_blocks, counts.iter().sum::<u64>());
    if is_idle {
        prop_assert_eq!(engine.pool.stats().held, stats.num_kept_blocks);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn what_is_kept_is_what_the_plain_list_says(
        bounds in [0..14u32, 0..40u32],
        operations in prop::collection::vec(operation(), 1..40),
    ) {
        let mut engine = Engine::new(600, config(BLOCK_SIZE as u32), true);
        let tenants: Vec<Arc<Tenant>> =
            ["a", "b"].iter().zip(bounds).map(|(name, bound)| engine.tenant_that_keeps(name, bound)).collect();
        let (mut asked, mut models) = (Asked::new(), [Model::default(), Model::default()]);
        for operation in operations {
            match operation {
                Operation::Submit { tenant, family, shared, own, max_tokens, retention } => {
                    let tokens = family_prompt(family, shared, own);
                    let wanted = Request { retention, ..request(&tenants[tenant], &tokens, max_tokens) };
                    let id = engine.scheduler.submit(wanted).expect("accepted");
                    asked.insert(id, (tenant, tokens, retention));
                }
                Operation::Turns(count) => {
                    for _ in 0..count {
                        turn(&mut engine, &mut asked, &mut models, bounds);
                        check(&engine, &tenants, &models, asked.is_empty())?;
                    }
                }
            }
        }
        while !asked.is_empty() {
            turn(&mut engine, &mut asked, &mut models, bounds);
        }
        check(&engine, &tenants, &models, true)?;
        // And it is these very prefixes that are held.
        let index = Arc::clone(engine.index.as_ref().expect("an index"));
        index.evict(u32::MAX);
        for (tenant, model) in tenants.iter().zip(&models) {
            let namespace = tenant.namespace().expect("an index");
            for kept in &model.kept {
                let longer = [&kept.tokens[..], &[1_000_000]].concat();
                prop_assert_eq!(index.peek_prefix(namespace, &longer).expect("known"), kept.tokens.len());
            }
        }
    }
}
