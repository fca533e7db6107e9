//! Everything on at once: layer groups, a host tier, several open steps on a device that lags, drafts, forks, samples,
//! re-orders, sessions, retention, a strict tenant, priorities with urgent preemption, pauses, aborts, crashes and changes of quota, under every
//! policy. The model's memory is really copied as the batches say, so a wrong order shows as wrong content.

mod support;

use kvpager_core::block_pool::Quota;
use kvpager_core::prefix_index::Isolation;
use kvpager_core::scheduler::{
    AdmissionPolicy, Deadline, FinishReason, ForecastConfig, Retention, Session, Tenant, ZeroBlocks,
};
use kvpager_core::{Error, SequenceId};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::HashMap;
use std::sync::Arc;
use support::{
    Engine, any_groups, config, expected_output, expected_sample, host_tier, prefix_hash, request,
    tenant_config,
};

#[derive(Clone, Debug)]
enum Operation {
    Submit {
        family: u32,
        shared: u32,
        own: u32,
        max_tokens: u32,
        n: u32,
        priority: i32,
        in_session: bool,
    },
    TakeOff,
    Land,
    Crash {
        place: Index,
        fail: bool,
    },
    Draft {
        length: usize,
        num_right: usize,
    },
    Fork(Index, u32),
    Reorder(Index, u32),
    Abort(Index),
    Pause(Index),
    Resume(Index),
    Evict(u32),
    Reset,
    Quota(u32),
    OpenSession(Option<u64>),
    CloseSession(Index),
    /// What requests ask to be kept from now on.
    Retain(Option<Retention>),
}

fn operation() -> impl Strategy<Value = Operation> {
    let which = any::<Index>;
    let n = prop::sample::select(vec![1, 1, 1, 2, 3]);
    let submit = (0..3u32, 0..20u32, 1..8u32, 1..40u32, n, 0..3i32, any::<bool>()).prop_map(
        |(family, shared, own, max_tokens, n, priority, in_session)| Operation::Submit {
            family,
            shared,
            own,
            max_tokens,
            n,
            priority,
            in_session,
        },
    );
    let limit = prop::option::of(1..30u64);
    let retention = (limit, prop::option::of(1..20u32), 0..3i32).prop_map(|(steps, num_tokens, priority)| {
        Retention { limit: Deadline { steps, seconds: None }, num_tokens, priority }
    });
    prop_oneof![
        1 => prop::option::weighted(0.8, retention).prop_map(Operation::Retain),
        6 => submit,
        14 => Just(Operation::TakeOff),
        10 => Just(Operation::Land),
        1 => (which(), prop::bool::weighted(0.2)).prop_map(|(place, fail)| Operation::Crash { place, fail }),
        3 => (1..6usize, 0..6usize).prop_map(|(length, num_right)| Operation::Draft { length, num_right }),
        3 => (which(), 1..3u32).prop_map(|(which, count)| Operation::Fork(which, count)),
        3 => (which(), any::<u32>()).prop_map(|(which, seed)| Operation::Reorder(which, seed)),
        1 => which().prop_map(Operation::Abort),
        1 => which().prop_map(Operation::Pause),
        1 => which().prop_map(Operation::Resume),
        1 => (1..6u32).prop_map(Operation::Evict),
        1 => Just(Operation::Reset),
        1 => (1..4u32).prop_map(Operation::Quota),
        1 => prop::option::of(1..6u64).prop_map(Operation::OpenSession),
        1 => which().prop_map(Operation::CloseSession),
    ]
}

fn policy() -> impl Strategy<Value = AdmissionPolicy> {
    let bold = ForecastConfig { free_share: 0.0, deviations: 0.001, growth_spread: 0.0 };
    prop::sample::select(vec![
        AdmissionPolicy::Reserve,
        AdmissionPolicy::Watermark { free_share: 0.0 },
        AdmissionPolicy::Watermark { free_share: 0.1 },
        AdmissionPolicy::Forecast(bold),
        AdmissionPolicy::Forecast(ForecastConfig::default()),
    ])
}

/// What was accepted: its prompt, its limit, and which sample it is if its request was for several.
#[derive(Clone, Debug)]
struct Accepted {
    prompt: Vec<u32>,
    max_tokens: u32,
    branch: Option<u64>,
    /// The id that its set began with.
    root: SequenceId,
}

impl Accepted {
    fn expected(&self) -> Vec<u32> {
        match self.branch {
            Some(branch) => expected_sample(&self.prompt, self.max_tokens, branch),
            None => expected_output(&self.prompt, self.max_tokens, &[]),
        }
    }
}

/// An engine with what was asked of it.
struct World {
    engine: Engine,
    tenants: [Arc<Tenant>; 2],
    accepted: HashMap<SequenceId, Accepted>,
    ids: Vec<SequenceId>,
    sessions: Vec<Arc<Session>>,
    retention: Option<Retention>,
    may_end_early: Vec<SequenceId>,
    quota_changed: bool,
    max_open_steps: usize,
}

impl World {
    fn pick(&self, which: &Index) -> Option<SequenceId> {
        (!self.ids.is_empty()).then(|| self.ids[which.index(self.ids.len())])
    }

    fn accept(&mut self, id: SequenceId, accepted: Accepted) {
        self.ids.push(id);
        self.accepted.insert(id, accepted);
    }

    fn submit(&mut self, operation: &Operation) {
        let &Operation::Submit { family, shared, own, max_tokens, n, priority, in_session } = operation
        else {
            return;
        };
        // Few families of prompts and few tokens, so that prefixes are shared, split and computed twice.
        let head = (0..shared).map(|i| 100 + family + i % 2);
        let prompt: Vec<u32> = head.chain((0..own).map(|i| 7 + i)).collect();
        let mut wanted = request(&self.tenants[family as usize % 2], &prompt, max_tokens);
        (wanted.n, wanted.priority) = (n, priority);
        wanted.retention = self.retention.filter(|_| self.engine.index.is_some());
        if let (true, Some(session)) = (in_session, self.sessions.last()) {
            wanted.retention = None;
            (wanted.n, wanted.tenant) = (1, Arc::clone(&session.tenant));
            wanted.session = Some(Arc::clone(session));
        }
        let n = wanted.n;
        match self.engine.submit_request(wanted) {
            Ok(first) => (0..u64::from(n)).for_each(|branch| {
                let branch_of = (n > 1).then_some(branch);
                let accepted =
                    Accepted { prompt: prompt.clone(), max_tokens, branch: branch_of, root: first };
                self.accept(SequenceId(first.0 + branch), accepted);
            }),
            Err(Error::Refused { .. }) => {}
            Err(other) => panic!("{other}"),
        }
    }

    /// Drafts for all that run: some right ones, then a wrong one.
    fn draft(&self, length: usize, num_right: usize) {
        for (id, accepted) in &self.accepted {
            let all = accepted.expected();
            let done = self.engine.outputs.get(id).map_or(0, Vec::len).min(all.len());
            let mut drafts: Vec<i32> = all[done..].iter().map(|&token| token as i32).take(length).collect();
            if let Some(wrong) = drafts.get_mut(num_right) {
                *wrong += 1;
            }
            let start = [0, drafts.len() as i32];
            self.engine.scheduler.propose(&[*id], &start, &drafts).expect("nobody else is in the scheduler");
        }
    }

    fn fork(&mut self, id: SequenceId, count: u32) {
        let parent = self.accepted[&id].clone();
        for child in self.engine.fork(id, count).unwrap_or_default() {
            self.accept(child, parent.clone());
        }
    }

    /// Lets branches of a set that have the same to output take each other's place.
    fn reorder(&mut self, id: SequenceId, seed: u32) {
        let one = &self.accepted[&id];
        let is_alike = |id: &&SequenceId| {
            let other = &self.accepted[*id];
            let lives = !self.engine.finished.contains_key(id) && self.engine.outputs.contains_key(id);
            lives && (other.root, other.branch) == (one.root, one.branch)
        };
        let alike: Vec<_> = self.ids.iter().filter(is_alike).copied().collect();
        let mixed = |i: usize| prefix_hash(&[seed, i as u32]) as usize;
        let parents: Vec<_> = (0..alike.len()).map(|i| alike[mixed(i) % alike.len()]).collect();
        let last = |id| self.engine.outputs[id].last().map_or(0, |&token| token as i32);
        let tokens: Vec<_> = parents.iter().map(last).collect();
        match self.engine.reorder(&alike, &parents, &tokens) {
            Ok(()) | Err(Error::WrongState(_) | Error::InvalidArgument(_)) => {}
            Err(other) => panic!("a re-order needs nothing: {other}"),
        }
    }

    fn set_quota(&mut self, share: u32) {
        let limit = self.engine.pool.num_blocks() * share / 3;
        let quota = Quota { guaranteed: 0, limit };
        self.quota_changed |= self.engine.pool.set_quota(self.tenants[0].account, quota).is_ok();
    }

    fn apply(&mut self, operation: &Operation) {
        let num_open = self.engine.flights.len();
        match operation {
            Operation::Submit { .. } => self.submit(operation),
            Operation::TakeOff if num_open < self.max_open_steps => {
                self.engine.take_off();
            }
            Operation::Land if num_open > 0 => {
                self.engine.land();
            }
            Operation::Crash { place, fail } if num_open > 0 => {
                if *fail {
                    self.may_end_early.extend(&self.ids);
                }
                self.engine.crash(place.index(num_open), *fail);
            }
            Operation::Draft { length, num_right } if num_open == 0 => self.draft(*length, *num_right),
            Operation::Fork(which, count) => {
                if let Some(id) = self.pick(which) {
                    self.fork(id, *count);
                }
            }
            Operation::Reorder(which, seed) if num_open == 0 => {
                if let Some(id) = self.pick(which) {
                    self.reorder(id, *seed);
                }
            }
            Operation::Abort(which) => {
                if let Some(id) = self.pick(which) {
                    // A request's first id stands for all of its samples.
                    self.may_end_early.extend((id.0..id.0 + 3).map(SequenceId));
                    self.engine.scheduler.abort(id).expect("it was issued");
                }
            }
            Operation::Pause(which) => {
                if let Some(id) = self.pick(which) {
                    self.engine.scheduler.pause(id).expect("it was issued");
                }
            }
            Operation::Resume(which) => {
                if let Some(id) = self.pick(which) {
                    self.engine.scheduler.resume(id).expect("it was issued");
                }
            }
            Operation::Evict(num_blocks) => {
                if let Some(index) = &self.engine.index {
                    index.evict(*num_blocks);
                }
            }
            Operation::Reset if num_open == 0 => {
                self.engine.scheduler.reset_cache(true).expect("no step is open");
            }
            Operation::Quota(share) => self.set_quota(*share),
            Operation::OpenSession(steps) if self.engine.index.is_some() => {
                let limit = Deadline { steps: *steps, seconds: None };
                let tenant = &self.tenants[self.sessions.len() % 2];
                self.sessions.push(self.engine.scheduler.open_session(tenant, limit).expect("a session"));
            }
            Operation::Retain(asked) => self.retention = *asked,
            Operation::CloseSession(which) if !self.sessions.is_empty() => {
                let session = self.sessions.swap_remove(which.index(self.sessions.len()));
                self.engine.scheduler.close_session(&session);
            }
            _ => {}
        }
        self.engine.check();
    }

    /// Everything that was accepted ends; nothing is held when nothing runs.
    fn wind_up(&mut self) {
        self.set_quota(3);
        for id in &self.ids {
            self.engine.scheduler.resume(*id).expect("it was issued");
        }
        while !self.engine.flights.is_empty() {
            self.engine.land();
        }
        for session in &self.sessions {
            self.engine.scheduler.close_session(session);
        }
        for _ in 0..8000 {
            let has_work = self.engine.scheduler.has_work().expect("one thread");
            if has_work && self.engine.flights.len() < self.max_open_steps {
                self.engine.take_off();
            } else if self.engine.flights.is_empty() {
                break;
            } else {
                self.engine.land();
            }
        }
        // What was closed is let go by the next step, and what is retained for ever by a drain.
        self.engine.scheduler.drain(Deadline::default()).expect("a deadline");
        self.engine.turn();
        assert!(!self.engine.scheduler.has_work().expect("one thread"), "something is left");
        self.engine.check_idle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn with_everything_on_every_request_ends_with_the_tokens_of_its_prompt(
        num_blocks in prop_oneof![3 => 12..40u32, 1 => 60..160u32],
        block_size in 1..5u32,
        groups in any_groups(),
        cached in prop::bool::weighted(0.7),
        is_strict in prop::bool::weighted(0.3),
        (max_batch_tokens, max_prefill_chunk) in (6..20u32, 0..6u32),
        max_open_steps in 1..4u32,
        policy in policy(),
        host in host_tier(),
        lags in any::<bool>(),
        operations in prop::collection::vec(operation(), 1..120),
    ) {
        let mut config = config(block_size);
        config.layer_groups = groups;
        config.max_running = 5;
        config.max_batch_tokens = max_batch_tokens;
        config.max_prefill_chunk = max_prefill_chunk;
        config.max_open_steps = max_open_steps;
        config.zero_blocks = ZeroBlocks::Always;
        config.policy = policy;
        config.ageing_steps = 8;
        config.urgent_preempts = policy.overcommits();
        (config.overflow, config.host_tier) = host;
        let mut engine = Engine::new(num_blocks, config, cached);
        engine.lags = lags;
        let guaranteed = if is_strict { num_blocks / 2 } else { num_blocks / 4 };
        let mut other = tenant_config("b", guaranteed, num_blocks / 2);
        other.sharing.isolation = if is_strict { Isolation::Strict } else { Isolation::Scoped };
        let other = engine.scheduler.add_tenant(&other).expect("a tenant");
        let mut world = World {
            tenants: [engine.tenant("a"), other],
            engine,
            accepted: HashMap::new(),
            ids: Vec::new(),
            sessions: Vec::new(),
            retention: None,
            may_end_early: Vec::new(),
            quota_changed: false,
            max_open_steps: max_open_steps as usize,
        };
        for operation in &operations {
            world.apply(operation);
        }
        world.wind_up();
        if policy == AdmissionPolicy::Reserve {
            prop_assert_eq!(world.engine.scheduler.stats().num_preemptions, 0);
        }
        for (id, accepted) in &world.accepted {
            match world.engine.finished[id].reason {
                FinishReason::Length => prop_assert_eq!(&world.engine.outputs[id], &accepted.expected()),
                FinishReason::Capacity => prop_assert!(world.quota_changed),
                reason => prop_assert!(world.may_end_early.contains(id), "{id}: {reason:?}"),
            }
        }
    }
}
