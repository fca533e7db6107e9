//! What `forecast` looks at: how far those that run have got, and what they and a request that waits will grow by.

use super::compartments::range_of;
use super::core::Core;
use super::layer_groups::MAX_GROUPS;
use super::policy::{OutputLengths, Trajectory};
use super::request::WaitingRequest;
use super::sequence::Sequence;
use super::waiting_sets::{Known, common_blocks};
use crate::geometry::Span;
use crate::ids::BlockHandle;
use arrayvec::ArrayVec;

/// Steps between two looks at how far the running sequences have got.
const LOOK_STEPS: u64 = 32;

/// A sequence, or a branch of a set, as a forecast sees it.
#[derive(Clone, Copy, Debug)]
struct Growing {
    known: u32,
    /// Blocks that it holds, or is about to, shared ones included.
    held: f32,
    age: u32,
    most: u32,
    /// Blocks at its head that the branch before it has too. Each has most in common with its neighbours.
    common: f32,
}

impl Core {
    /// Adds a waiting request to a forecast.
    pub(super) fn add_growth(&self, growth: &mut Trajectory, waiting: &WaitingRequest) {
        if self.config.policy.forecasts() {
            let tenant = &waiting.request.tenant;
            let lengths = self.compartments[tenant.compartment].lengths.of(tenant.index);
            let held = |known: Known<'_>| {
                let max_tokens = known.request.max_tokens;
                self.config.known_blocks(known.tokens.len() as u32, known.prompt_tokens, max_tokens) as f32
            };
            self.add_set(growth, lengths, &self.branches_of(waiting.known(), 0.0, held));
        }
    }

    /// What a compartment's sequences that run will grow by.
    pub(super) fn growth_of_running(&self, compartment: usize) -> Trajectory {
        let mut growth = Trajectory::default();
        if self.config.policy.forecasts() {
            let learned = &self.compartments[compartment].lengths;
            for sequence in self.running_of(compartment).iter().chain(self.parked_of(compartment)) {
                let lengths = learned.of(sequence.request.tenant.index);
                if sequence.is_branch && self.sets.is_branch(sequence.id) {
                    if self.leads(sequence) {
                        self.add_set(&mut growth, lengths, &self.running_branches(sequence));
                    }
                } else if sequence.num_unsplit() > 0 {
                    self.add_set(&mut growth, lengths, &self.branches_in(sequence, 0.0));
                } else {
                    let (known, age) = (sequence.tokens.len() as u32, sequence.num_outputs());
                    let most = sequence.request.max_tokens - age;
                    self.add_sequence(&mut growth, lengths, (known, self.held_by(sequence)), age, most);
                }
            }
        }
        growth
    }

    /// Blocks of a running sequence, or of one on the host, which will have its tail again.
    fn held_by(&self, sequence: &Sequence) -> f32 {
        match sequence.layers {
            None => sequence.tokens.len() as f32 / self.config.block_size as f32,
            Some(_) => {
                let parked = sequence.parked.as_ref().map_or(0, |parked| parked.blocks.len());
                parked as f32 + sequence.num_held() as f32
            }
        }
    }

    /// The branches of the set of a running sequence, as they share their full blocks. A last block that several share
    /// counts with each of them: the copies are promised to them.
    fn running_branches(&self, sequence: &Sequence) -> Vec<Growing> {
        let mut running: Vec<_> = self.running_set(sequence).collect();
        // Where two part they never have a block in common again, so those that share most stand side by side.
        let blocks = |a: &Sequence, b: &Sequence| {
            let bits = |block: &BlockHandle| block.to_bits();
            a.blocks.iter().map(bits).cmp(b.blocks.iter().map(bits))
        };
        running.sort_unstable_by(|a, b| match self.config.keeps_first() {
            true => blocks(a, b),
            false => a.tokens.cmp(&b.tokens),
        });
        let mut branches = Vec::with_capacity(running.len());
        let mut before: Option<&Sequence> = None;
        for sequence in running {
            let common = before.map_or(0.0, |before| self.common_full_blocks(before, sequence));
            branches.extend(self.branches_in(sequence, common));
            before = Some(sequence);
        }
        branches
    }

    /// A running sequence and what it will split into; the first of them has `common` blocks with one before.
    fn branches_in(&self, sequence: &Sequence, common: f32) -> Vec<Growing> {
        let own = sequence.tokens.len() as f32;
        let scale = self.held_by(sequence) / own;
        self.branches_of(sequence.known(), common, |known| known.tokens.len() as f32 * scale)
    }

    /// Branches of which one is computed at first, in order of their tokens: what they have in common they will share,
    /// samples all of the prompt.
    fn branches_of(
        &self,
        mut all: Vec<Known<'_>>,
        mut common: f32,
        held: impl Fn(Known<'_>) -> f32,
    ) -> Vec<Growing> {
        let block_size = self.config.block_size;
        all.sort_by_key(|known| known.tokens);
        let mut branches = Vec::with_capacity(all.len());
        let mut before: Option<Known<'_>> = None;
        for known in all {
            if let Some(before) = before {
                common = self.in_blocks(common_blocks(before.tokens, known.tokens, block_size));
            }
            let length = known.tokens.len() as u32;
            let age = length - known.prompt_tokens;
            let (held, most) = (held(known), known.request.max_tokens - age);
            for _ in 0..known.request.n {
                branches.push(Growing { known: length, held, age, most, common });
                common = self.in_blocks(length / block_size);
            }
            before = Some(known);
        }
        branches
    }

    /// Full blocks at the head of both that are the same.
    fn common_full_blocks(&self, a: &Sequence, b: &Sequence) -> f32 {
        let block_size = self.config.block_size;
        if !self.config.keeps_first() {
            return self.in_blocks(common_blocks(&a.tokens, &b.tokens, block_size));
        }
        let full = a.num_computed.min(b.num_computed) / block_size;
        let same = a.blocks.iter().zip(&b.blocks).take(full as usize).take_while(|(a, b)| a == b).count();
        self.in_blocks(same as u32)
    }

    /// Blocks of some columns that branches pay once: in a first group that sees all tokens. Of further groups each pays for
    /// what it refers to.
    fn in_blocks(&self, num_columns: u32) -> f32 {
        self.num_spared(num_columns as usize) as f32
    }

    /// Adds branches that share blocks to a forecast: one by one what is their own, and once what several have.
    fn add_set(&self, growth: &mut Trajectory, lengths: &OutputLengths, branches: &[Growing]) {
        self.add_branches(growth, lengths, branches, 0.0);
    }

    /// The same of branches whose first `counted` blocks are in the forecast.
    fn add_branches(
        &self,
        growth: &mut Trajectory,
        lengths: &OutputLengths,
        branches: &[Growing],
        counted: f32,
    ) {
        let Some((first, rest)) = branches.split_first() else { return };
        if rest.is_empty() {
            let own = (first.held - counted).max(0.0);
            return self.add_sequence(growth, lengths, (first.known, own), first.age, first.most);
        }
        let common = rest.iter().map(|branch| branch.common).fold(f32::INFINITY, f32::min).max(counted);
        if common > counted {
            let lives = branches.iter().map(|branch| (branch.age, branch.most));
            growth.add_shared(lengths, common - counted, lives);
        }
        let mut start = 0;
        for end in 1..=branches.len() {
            if end == branches.len() || branches[end].common <= common {
                self.add_branches(growth, lengths, &branches[start..end], common);
                start = end;
            }
        }
    }

    /// Adds a sequence of (known tokens, blocks that it holds) to a forecast.
    fn add_sequence(
        &self,
        growth: &mut Trajectory,
        lengths: &OutputLengths,
        (known, held): (u32, f32),
        age: u32,
        most: u32,
    ) {
        let block_size = self.config.block_size as f32;
        if !self.config.is_grouped() {
            return growth.add(lengths, held, age, most, block_size);
        }
        let room = |span: &Span| span.window().map_or(f32::INFINITY, |w| (w as f32 - known as f32).max(0.0));
        let rooms: ArrayVec<f32, MAX_GROUPS> = self.config.layer_groups.iter().map(room).collect();
        growth.add_groups(lengths, held, age, most, block_size, &rooms);
    }

    /// Teaches the forecast how far the running sequences have got, and works it out again.
    pub(super) fn refresh_forecast(&mut self, compartment: usize) {
        let own = &mut self.compartments[compartment];
        let step = self.last_step.0;
        if !self.config.policy.forecasts() {
            return;
        }
        if step < own.refreshed_at + LOOK_STEPS {
            return own.lengths.fill_next(step);
        }
        own.refreshed_at = step;
        let (running, parked) = (range_of(&self.running, compartment), range_of(&self.parked, compartment));
        let sequences = self.running[running].iter_mut().chain(&mut self.parked[parked]);
        own.lengths.look(sequences.map(|sequence| {
            let age = sequence.num_outputs();
            (sequence.request.tenant.index, std::mem::replace(&mut sequence.known_age, age), age)
        }));
    }
}

#[cfg(test)]
mod tests;
