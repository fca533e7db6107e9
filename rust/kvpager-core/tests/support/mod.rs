//! An engine for tests: a "model" whose KV of a position is a hash of all tokens up to it, so that a slot
//! which holds anything else is seen the moment it is read. Each layer group has KV of its own, and its queries read no
//! more than it sees.

#![allow(
    dead_code,
    clippy::allow_attributes,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

use kvpager_core::block_pool::{BlockPool, PoolConfig};
use kvpager_core::geometry::Span;
use kvpager_core::prefix_index::{EvictionPolicy, IndexConfig, PrefixIndex};
use kvpager_core::scheduler::{
    AdmissionPolicy, Batch, BatchArrays, Deadline, FinishedRequest, HostTierConfig, Overflow,
    PADDING_SEQUENCE, QueueLimits, Request, Retention, Scheduler, SchedulerConfig, Tenant, TenantConfig,
};
use kvpager_core::{Error, Result, SequenceId};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};

/// No host tier, one that is soon full, one with room; deadlines from "at once" to "never".
pub fn host_tier() -> impl Strategy<Value = (Overflow, HostTierConfig)> {
    let overflow =
        prop_oneof![1 => Just(Overflow::Auto), 1 => Just(Overflow::Recompute), 4 => Just(Overflow::Swap)];
    let gap = prop::sample::select(vec![1e-9, 1.0, 3.0, 1e9]);
    (overflow, prop_oneof![1 => Just(0), 3 => 1..100u32], gap).prop_map(
        |(overflow, num_blocks, max_token_gap)| {
            let overflow = if num_blocks == 0 { Overflow::Auto } else { overflow };
            (overflow, HostTierConfig { num_blocks, max_token_gap, ..HostTierConfig::default() })
        },
    )
}

pub fn span() -> impl Strategy<Value = Span> {
    prop_oneof![Just(Span::Full), (1..12u64).prop_map(Span::Sliding), (1..12u64).prop_map(Span::Chunked)]
}

/// One full group, or any: windows beside one that sees all tokens, or windows alone.
pub fn any_groups() -> impl Strategy<Value = Box<[Span]>> {
    prop_oneof![1 => Just(vec![Span::Full]), 2 => prop::collection::vec(span(), 1..4)]
        .prop_map(Vec::into_boxed_slice)
}

/// Hash of a prefix, one token at a time.
pub fn mix(prefix: u64, token: u32) -> u64 {
    let mixed = (prefix ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

pub fn prefix_hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0x5eed, |hash, &token| mix(hash, token))
}

/// The token that the model samples after a prefix.
pub fn next_token(hash: u64) -> u32 {
    (hash % 50) as u32
}

/// What sample `branch` of a request must give.
pub fn expected_sample(prompt: &[u32], max_tokens: u32, branch: u64) -> Vec<u32> {
    let first = next_token(prefix_hash(prompt).wrapping_add(branch));
    let mut tokens = prompt.to_vec();
    tokens.push(first);
    let mut output = vec![first];
    if max_tokens > 1 {
        output.extend(expected_output(&tokens, max_tokens - 1, &[]));
    }
    output
}

/// Points between `step` and `commit`: before anything, after each kind of move, in the midst of the rows, after all.
pub const CRASH_POINTS: usize = 7;

/// What a request must give, whatever the schedule.
pub fn expected_output(prompt: &[u32], max_tokens: u32, stop: &[u32]) -> Vec<u32> {
    let mut hash = prefix_hash(prompt);
    let mut output = Vec::new();
    while (output.len() as u32) < max_tokens {
        let token = next_token(hash);
        output.push(token);
        if stop.contains(&token) {
            break;
        }
        hash = mix(hash, token);
    }
    output
}

pub fn config(block_size: u32) -> SchedulerConfig {
    SchedulerConfig {
        block_size,
        max_batch_tokens: 32,
        max_running: 8,
        max_model_tokens: 256,
        queue: QueueLimits { max_requests: 64, ..QueueLimits::NONE },
        max_prefill_chunk: 0,
        policy: AdmissionPolicy::Reserve,
        max_bypass: 8,
        max_bypass_steps: 64,
        ..SchedulerConfig::default()
    }
}

/// "KV" of a position: the hash of all tokens up to it, other in each layer group, and the token itself.
#[derive(Clone, Copy, Debug)]
struct Slot {
    hash: u64,
    token: u32,
}

impl Slot {
    fn of(group: usize, hash: u64, token: u32) -> Self {
        Self { hash: hash ^ (group as u64).wrapping_mul(0xd6e8_feb8_6659_fd93), token }
    }
}

/// The first position that a query sees, written down once more.
pub fn first_seen(span: Span, position: usize) -> usize {
    match span {
        Span::Full => 0,
        Span::Sliding(window) => (position + 1).saturating_sub(window as usize),
        Span::Chunked(chunk) => position / chunk as usize * chunk as usize,
    }
}

/// A step that nobody has committed yet.
pub struct Flight {
    pub batch: Batch,
    /// What became of it, if the "device" has run it.
    ran: Option<Ran>,
}

/// What a step that has run gave.
struct Ran {
    token_start: Vec<i32>,
    tokens: Vec<i32>,
    /// (group, row, column, block id) that its queries read.
    seen: Vec<(usize, usize, usize, i32)>,
    /// Whose outputs grew, by how many tokens.
    grown: Vec<(SequenceId, usize)>,
}

pub struct Engine {
    pub pool: Arc<BlockPool>,
    pub index: Option<Arc<PrefixIndex>>,
    pub scheduler: Arc<Scheduler>,
    pub finished: HashMap<SequenceId, FinishedRequest>,
    pub outputs: HashMap<SequenceId, Vec<u32>>,
    /// What each slot holds.
    kv: Vec<Option<Slot>>,
    /// The same of the host tier.
    host: Vec<Option<Slot>>,
    /// Account that last wrote each block, to check what is zeroed.
    writer: Vec<Option<SequenceId>>,
    block_size: usize,
    /// Tokens computed of each sequence, for models in which no group keeps all.
    histories: HashMap<u64, Vec<u32>>,
    /// Of each sequence that was submitted here: in such models, what a match skips is in no slot.
    prompts: Mutex<HashMap<u64, Vec<u32>>>,
    /// What the last step read of the tables: see `Flight::seen`.
    seen: Vec<(usize, usize, usize, i32)>,
    /// What the last step sampled, by its `sample_rows`.
    last_samples: Vec<u32>,
    /// Whose outputs the last step made longer, by how many tokens.
    grown: Vec<(SequenceId, usize)>,
    pub flights: VecDeque<Flight>,
    /// Whether the "device" runs a step right before it lands, when later ones are planned already.
    pub lags: bool,
}

impl Engine {
    pub fn new(num_blocks: u32, config: SchedulerConfig, reuse: bool) -> Self {
        Self::try_new(num_blocks, config, reuse).unwrap()
    }

    pub fn try_new(num_blocks: u32, config: SchedulerConfig, reuse: bool) -> Result<Self> {
        let pool = BlockPool::new(PoolConfig { num_blocks, ..PoolConfig::default() }).unwrap();
        let index = reuse.then(|| {
            let index = IndexConfig { block_size: config.block_size, eviction: EvictionPolicy::Lru };
            PrefixIndex::new(Arc::clone(&pool), index).unwrap()
        });
        Self::with_index(pool, index, config)
    }

    pub fn with_index(
        pool: Arc<BlockPool>,
        index: Option<Arc<PrefixIndex>>,
        config: SchedulerConfig,
    ) -> Result<Self> {
        let num_blocks = pool.num_blocks();
        let block_size = config.block_size as usize;
        let host_slots = config.host_tier.num_blocks as usize * block_size;
        let scheduler = Arc::new(Scheduler::new(Arc::clone(&pool), index.clone(), config)?);
        Ok(Self {
            kv: vec![None; num_blocks as usize * block_size],
            host: vec![None; host_slots],
            writer: vec![None; num_blocks as usize],
            pool,
            index,
            scheduler,
            finished: HashMap::new(),
            outputs: HashMap::new(),
            block_size,
            histories: HashMap::new(),
            prompts: Mutex::default(),
            seen: Vec::new(),
            last_samples: Vec::new(),
            grown: Vec::new(),
            flights: VecDeque::new(),
            lags: false,
        })
    }

    pub fn tenant(&self, name: &str) -> Arc<Tenant> {
        self.tenant_with(name, 0, self.pool.num_blocks())
    }

    pub fn tenant_with(&self, name: &str, guaranteed: u32, limit: u32) -> Arc<Tenant> {
        self.scheduler.add_tenant(&tenant_config(name, guaranteed, limit)).unwrap()
    }

    /// A tenant of which no more than so many blocks are kept after a request's end.
    pub fn tenant_that_keeps(&self, name: &str, most: u32) -> Arc<Tenant> {
        let config = tenant_config(name, 0, self.pool.num_blocks());
        self.scheduler.add_tenant(&TenantConfig { max_kept_blocks: Some(most), ..config }).unwrap()
    }

    pub fn held(&self) -> u64 {
        self.pool.stats().held
    }

    pub fn submit(&self, tenant: &Arc<Tenant>, prompt: &[u32], max_tokens: u32) -> Result<SequenceId> {
        self.submit_request(request(tenant, prompt, max_tokens))
    }

    pub fn submit_request(&self, request: Request) -> Result<SequenceId> {
        let prompt = request.prompt.clone();
        let n = u64::from(request.n);
        let id = self.scheduler.submit(request)?;
        let mut prompts = self.prompts.lock().unwrap();
        (0..n).for_each(|branch| {
            prompts.insert(id.0 + branch, prompt.clone());
        });
        drop(prompts);
        Ok(id)
    }

    /// The "forward pass": checks every slot that a query sees, writes the new ones, samples.
    pub fn run(&mut self, batch: &Batch) -> (Vec<i32>, Vec<i32>) {
        let arrays = &batch.arrays;
        let arenas = self.scheduler.arenas().to_vec();
        let spans = self.scheduler.config().layer_groups.clone();
        self.move_blocks(arrays);
        self.seen.clear();
        self.grown.clear();
        let (mut token_start, mut tokens) = (vec![0], Vec::new());
        let previous = std::mem::take(&mut self.last_samples);
        for row in 0..arrays.sequence_ids.len() {
            let range = arrays.query_start[row] as usize..arrays.query_start[row + 1] as usize;
            if arrays.sequence_ids[row] == PADDING_SEQUENCE {
                assert_eq!(arrays.context_lens[row], 0);
                assert!(arrays.slot_mapping[range.clone()].iter().all(|&slot| slot == -1));
                let others = arrays.groups.iter().map(|group| &group.slot_mapping[range.clone()]);
                assert!(others.flatten().all(|&slot| slot == -1));
                token_start.push(tokens.len() as i32);
                continue;
            }
            let table_row = arrays.table_rows[row] as usize;
            let block_size = self.block_size;
            let slot_in = |group: usize, position: usize| {
                let block = arenas[group].get(table_row, position / block_size).unwrap();
                assert!(block >= 0, "position {position} has no block in group {group}");
                block as usize * block_size + position % block_size
            };
            let slot_of = |position: usize| slot_in(0, position);
            let first = arrays.positions[range.start] as usize;
            let history = self.history(arrays.sequence_ids[row], first, spans[0], slot_of);
            for (group, &span) in spans.iter().enumerate() {
                self.check_window(group, first_seen(span, first), &history, |p| slot_in(group, p));
                let columns = first_seen(span, first) / block_size
                    ..=arrays.positions[range.end - 1] as usize / block_size;
                let entry = |c| (group, table_row, c, arenas[group].get(table_row, c).unwrap());
                self.seen.extend(columns.map(entry));
            }
            let mut hash = prefix_hash(&history);
            let before = tokens.len();
            for index in range.clone() {
                let position = arrays.positions[index] as usize;
                assert_eq!(arrays.slot_mapping[index] as usize, slot_of(position));
                let token = match (arrays.token_ids[index], arrays.token_source[index]) {
                    (-1, source) => previous[source as usize],
                    (token, -1) => token as u32,
                    both => panic!("a token is known or has a source: {both:?}"),
                };
                // Samples are of use as long as they are what comes next: the drafts that were right.
                let follows =
                    index == range.start || tokens.len() == before || tokens.last() == Some(&(token as i32));
                hash = mix(hash, token);
                for group in 0..spans.len() {
                    self.kv[slot_in(group, position)] = Some(Slot::of(group, hash, token));
                }
                for (i, group) in arrays.groups.iter().enumerate() {
                    assert_eq!(group.slot_mapping[index] as usize, slot_in(i + 1, position));
                }
                if spans[0] != Span::Full {
                    self.histories.entry(arrays.sequence_ids[row]).or_default().push(token);
                }
                for number in 0..arrays.sample_rows.iter().filter(|&&row| row == index as i32).count() {
                    let sample = next_token(hash.wrapping_add(number as u64));
                    self.last_samples.push(sample);
                    let in_step = tokens.len() - before == index - range.start || number > 0;
                    if (follows && in_step) || range.end - index == 1 && tokens.len() == before {
                        tokens.push(sample as i32);
                    }
                }
            }
            assert_eq!(arrays.context_lens[row], arrays.positions[range.end - 1] + 1);
            let id = SequenceId(arrays.sequence_ids[row]);
            let last = range.end as i32 - 1;
            let is_split = arrays.sample_rows.iter().filter(|&&row| row == last).count() > 1;
            for (i, &token) in tokens[before..].iter().enumerate() {
                let branch = SequenceId(id.0 + if is_split { i as u64 } else { 0 });
                self.outputs.entry(branch).or_default().push(token as u32);
                self.grown.push((branch, 1));
            }
            token_start.push(tokens.len() as i32);
        }
        (token_start, tokens)
    }

    /// The tokens before position `first`: read from the first group if it keeps all, every slot following from the
    /// one before it; else remembered from the batches.
    fn history(&mut self, id: u64, first: usize, span: Span, slot_of: impl Fn(usize) -> usize) -> Vec<u32> {
        if span != Span::Full {
            let history = self.histories.entry(id).or_default();
            if history.len() < first {
                let output = self.outputs.get(&SequenceId(id)).map_or(&[][..], Vec::as_slice);
                let known = [&self.prompts.lock().unwrap()[&id][..], output].concat();
                history.extend_from_slice(&known[history.len()..first]);
            }
            history.truncate(first);
            return history.clone();
        }
        let read =
            |position| self.kv[slot_of(position)].expect("a slot is read that was never written").token;
        (0..first).map(read).collect()
    }

    /// Every slot of a group from `from` on to the end of what is there holds KV of exactly these tokens.
    fn check_window(&self, group: usize, from: usize, history: &[u32], slot_of: impl Fn(usize) -> usize) {
        let mut hash = prefix_hash(&history[..from.min(history.len())]);
        for (position, &token) in history.iter().enumerate().skip(from) {
            hash = mix(hash, token);
            let slot = self.kv[slot_of(position)].expect("a slot is read that was never written");
            let expected = Slot::of(group, hash, token).hash;
            assert_eq!(slot.hash, expected, "position {position} of group {group} holds other KV");
        }
    }

    /// What a batch moves before its forward pass, in the order of the stream.
    fn move_blocks(&mut self, arrays: &BatchArrays) {
        check_moves(arrays);
        self.move_some(arrays, 4);
    }

    /// The first `stages` of the four kinds of moves.
    fn move_some(&mut self, arrays: &BatchArrays, stages: usize) {
        let size = self.block_size;
        let slots = |block: i32| block as usize * size..(block as usize + 1) * size;
        let done = |stage: usize| usize::from(stage < stages);
        for &[device, host] in arrays.swap_out.iter().take(arrays.swap_out.len() * done(0)) {
            self.host[slots(host)].copy_from_slice(&self.kv[slots(device)]);
        }
        for &block in arrays.block_zeros.iter().take(arrays.block_zeros.len() * done(1)) {
            self.kv[slots(block)].fill(None);
        }
        for &[host, device] in arrays.swap_in.iter().take(arrays.swap_in.len() * done(2)) {
            self.kv[slots(device)].copy_from_slice(&self.host[slots(host)]);
        }
        for &[from, to] in arrays.block_copies.iter().take(arrays.block_copies.len() * done(3)) {
            self.kv.copy_within(slots(from), slots(to).start);
        }
    }

    /// One whole turn. Returns the batch's number of tokens.
    pub fn turn(&mut self) -> usize {
        let batch = self.scheduler.step(0).unwrap();
        self.run_and_commit(&batch)
    }

    /// A turn at a time of the caller's clock.
    pub fn turn_at(&mut self, now: f64) -> usize {
        let batch = self.scheduler.step_at(0, now).unwrap();
        self.run_and_commit(&batch)
    }

    fn run_and_commit(&mut self, batch: &Batch) -> usize {
        let (token_start, tokens) = self.run(batch);
        self.note(batch.arrays.finished.iter().cloned());
        let outcome = self.scheduler.commit(batch.step_id, &token_start, &tokens).unwrap();
        self.note(outcome.finished);
        self.check();
        batch.arrays.token_ids.len()
    }

    /// Plans a step and runs it, without waiting for the ones before; if the device lags, it runs later.
    pub fn take_off(&mut self) -> usize {
        let batch = match self.scheduler.step(0) {
            Ok(batch) => batch,
            // The pool counts abandoned steps as open until the ones before them are closed.
            Err(Error::WrongState(_)) if !self.flights.is_empty() => {
                self.land();
                return 0;
            }
            Err(error) => panic!("{error}"),
        };
        self.note(batch.arrays.finished.iter().cloned());
        let num_tokens = batch.arrays.token_ids.len();
        let ran = (!self.lags).then(|| self.fly(&batch));
        self.flights.push_back(Flight { batch, ran });
        self.check();
        num_tokens
    }

    fn fly(&mut self, batch: &Batch) -> Ran {
        let (token_start, tokens) = self.run(batch);
        let (seen, grown) = (std::mem::take(&mut self.seen), std::mem::take(&mut self.grown));
        Ran { token_start, tokens, seen, grown }
    }

    /// Commits the oldest step.
    pub fn land(&mut self) -> u64 {
        let flight = self.flights.pop_front().unwrap();
        let ran = flight.ran.unwrap_or_else(|| self.fly(&flight.batch));
        for &(group, row, column, block) in &ran.seen {
            let now = self.scheduler.arenas()[group].get(row, column).unwrap();
            assert_eq!(now, block, "an entry that an open step reads was overwritten");
        }
        let outcome = self.scheduler.commit(flight.batch.step_id, &ran.token_start, &ran.tokens).unwrap();
        self.note(outcome.finished);
        self.check();
        outcome.dropped_tokens
    }

    /// Abandons the open step at `place` and those after it.
    pub fn crash(&mut self, place: usize, fail: bool) {
        let step_id = self.flights[place].batch.step_id;
        while self.flights.len() > place {
            let flight = self.flights.pop_back().unwrap();
            for (id, count) in flight.ran.map_or(Vec::new(), |ran| ran.grown) {
                if let Some(output) = self.outputs.get_mut(&id) {
                    output.truncate(output.len() - count.min(output.len()));
                }
            }
        }
        let outcome = self.scheduler.abandon(step_id, "crash", fail).unwrap();
        self.note(outcome.finished);
        self.check();
    }

    /// Forks a running sequence; the new ones have its output so far.
    pub fn fork(&mut self, id: SequenceId, count: u32) -> Result<Vec<SequenceId>> {
        let forked = self.scheduler.fork(id, count)?;
        for &child in &forked {
            let output = self.outputs.get(&id).cloned().unwrap_or_default();
            self.outputs.insert(child, output);
            let prompts = self.prompts.get_mut().unwrap();
            if let Some(prompt) = prompts.get(&id.0).cloned() {
                prompts.insert(child.0, prompt);
            }
        }
        self.check();
        Ok(forked)
    }

    /// Re-orders beams; each has its parent's output then, with another last token.
    pub fn reorder(&mut self, ids: &[SequenceId], parents: &[SequenceId], tokens: &[i32]) -> Result<()> {
        self.scheduler.reorder(ids, parents, tokens)?;
        let outputs: Vec<_> = parents.iter().map(|parent| self.outputs[parent].clone()).collect();
        for ((id, mut output), &token) in ids.iter().zip(outputs).zip(tokens) {
            *output.last_mut().unwrap() = token as u32;
            self.outputs.insert(*id, output);
            self.histories.remove(&id.0);
        }
        self.check();
        Ok(())
    }

    /// A turn whose model crashes before it has moved or written anything.
    pub fn crashed_turn(&mut self) {
        let batch = self.scheduler.step(0).unwrap();
        self.note(batch.arrays.finished.iter().cloned());
        let outcome = self.scheduler.abandon(batch.step_id, "crash", false).unwrap();
        self.note(outcome.finished);
        self.check();
    }

    /// A turn whose model dies at one of [`CRASH_POINTS`]: after some of the moves, or after it wrote some of its rows.
    /// What it left half done stays there, with garbage in the row that it was at.
    pub fn killed_turn(&mut self, point: usize, fail: bool) {
        let batch = self.scheduler.step(0).unwrap();
        self.note(batch.arrays.finished.iter().cloned());
        let arrays = &batch.arrays;
        if point >= CRASH_POINTS - 1 {
            let (outputs, samples) = (self.outputs.clone(), self.last_samples.clone());
            self.run(&batch);
            (self.outputs, self.last_samples) = (outputs, samples);
        } else {
            self.move_some(arrays, point);
            if point > 4 {
                let written = arrays.slot_mapping.len() * (point - 4) / 2;
                for &slot in arrays.slot_mapping[..written].iter().filter(|&&slot| slot >= 0) {
                    self.kv[slot as usize] = Some(Slot { hash: 0xdead, token: 0 });
                }
            }
        }
        let outcome = self.scheduler.abandon(batch.step_id, "killed", fail).unwrap();
        self.note(outcome.finished);
        self.check();
    }

    /// A turn whose model crashes after it wrote its KV.
    pub fn abandoned_turn(&mut self, fail: bool) {
        let batch = self.scheduler.step(0).unwrap();
        let outputs = self.outputs.clone();
        self.run(&batch);
        self.outputs = outputs;
        self.note(batch.arrays.finished.iter().cloned());
        let outcome = self.scheduler.abandon(batch.step_id, "crash", fail).unwrap();
        self.note(outcome.finished);
        self.check();
    }

    pub fn note(&mut self, finished: impl IntoIterator<Item = FinishedRequest>) {
        for request in finished {
            let id = request.id;
            if let Some(output) = self.outputs.get_mut(&id) {
                // Steps that were planned ahead may have sampled past the end.
                output.truncate(request.output_tokens as usize);
            }
            assert!(self.finished.insert(id, request).is_none(), "request {id} ended twice");
        }
    }

    /// Turns until nothing is left; `max_turns` is the bound that makes "never stuck" a test.
    pub fn finish(&mut self, max_turns: usize) {
        for _ in 0..max_turns {
            if !self.scheduler.has_work().unwrap() {
                return;
            }
            self.turn();
        }
        panic!("not done after {max_turns} turns: {:?}", self.scheduler.stats());
    }

    pub fn check(&self) {
        self.pool.check_invariants().unwrap();
        self.scheduler.check_invariants().unwrap();
        if let Some(host) = self.scheduler.host_pool() {
            host.check_invariants().unwrap();
        }
        if let Some(index) = &self.index {
            index.check_invariants().unwrap();
        }
        let stats = self.pool.stats();
        assert!(stats.held + stats.reserved + stats.quarantined <= stats.capacity, "{stats:?}");
        let sum = stats.held + stats.cached + stats.free + stats.quarantined;
        if self.flights.is_empty() {
            assert_eq!(sum, stats.capacity, "{stats:?}");
        } else {
            // What waits for a step and was matched again has its capacity twice until the step closes.
            assert!(sum >= stats.capacity, "{stats:?}");
        }
    }

    pub fn check_idle(&self) {
        let stats = self.pool.stats();
        assert_eq!((stats.held, stats.reserved, stats.quarantined), (0, 0, 0), "{stats:?}");
        assert_eq!(stats.free + stats.cached, stats.capacity);
        if let Some(host) = self.scheduler.host_pool() {
            assert_eq!(host.stats().free, host.stats().capacity);
        }
    }
}

/// No block is written twice, and none is written by one kind of move that a later kind reads.
fn check_moves(arrays: &BatchArrays) {
    let column = |pairs: &[[i32; 2]], i: usize| pairs.iter().map(|pair| pair[i]).collect::<Vec<_>>();
    let distinct = |blocks: &[i32]| blocks.iter().collect::<HashSet<_>>().len() == blocks.len();
    let disjoint = |a: &[i32], b: &[i32]| a.iter().all(|block| !b.contains(block));
    let (out_from, out_to) = (column(&arrays.swap_out, 0), column(&arrays.swap_out, 1));
    let (in_from, in_to) = (column(&arrays.swap_in, 0), column(&arrays.swap_in, 1));
    let (copy_from, copy_to) = (column(&arrays.block_copies, 0), column(&arrays.block_copies, 1));
    assert!(distinct(&out_to) && distinct(&in_to) && distinct(&copy_to));
    assert!(disjoint(&out_to, &in_from), "a block swapped out is swapped in by the same step");
    assert!(disjoint(&out_from, &in_to), "a block that is swapped out is written by the same step");
    assert!(disjoint(&in_to, &copy_from) && disjoint(&arrays.block_zeros, &copy_from));
    let block_of = |slot: &i64| (*slot >= 0).then_some(*slot);
    let groups = arrays.groups.iter().flat_map(|group| &group.slot_mapping);
    let slots: Vec<i64> = arrays.slot_mapping.iter().chain(groups).filter_map(block_of).collect();
    let written: HashSet<i64> = slots.iter().copied().collect();
    assert_eq!(written.len(), slots.len());
}

pub fn tenant_config(name: &str, guaranteed: u32, limit: u32) -> TenantConfig {
    TenantConfig { guaranteed_blocks: guaranteed, ..TenantConfig::new(name, limit) }
}

pub fn request(tenant: &Arc<Tenant>, prompt: &[u32], max_tokens: u32) -> Request {
    Request::new(Arc::clone(tenant), prompt.to_vec(), max_tokens)
}

pub fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| seed * 1000 + i).collect()
}

/// Few families of prompts and few tokens, so that prefixes are shared, split and computed twice.
pub fn family_prompt(family: u32, shared: u32, own: u32) -> Vec<u32> {
    (0..shared).map(|i| 100 + family + i % 2).chain((0..own).map(|i| 7 + i)).collect()
}

pub const NO_LIMIT: Deadline = Deadline { steps: None, seconds: None };

pub fn after_steps(steps: u64) -> Deadline {
    Deadline { steps: Some(steps), seconds: None }
}

/// For less than so many steps or until the room is needed, of less than so many tokens or of all.
pub fn retention(
    steps: impl Strategy<Value = Option<u64>>,
    longest: u32,
    priorities: std::ops::Range<i32>,
) -> impl Strategy<Value = Retention> {
    (steps, prop::option::of(1..longest), priorities).prop_map(|(steps, num_tokens, priority)| Retention {
        limit: Deadline { steps, seconds: None },
        num_tokens,
        priority,
    })
}
