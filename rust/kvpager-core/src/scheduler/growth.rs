//! What `forecast` looks at: how far those that run have got, and what they and a request that waits will grow by.

use super::compartments::range_of;
use super::core::Core;
use super::layer_groups::MAX_GROUPS;
use super::policy::{OutputLengths, Trajectory};
use super::request::WaitingRequest;
use crate::geometry::Span;
use arrayvec::ArrayVec;

/// Steps between two looks at how far the running sequences have got.
const LOOK_STEPS: u64 = 32;

impl Core {
    /// Adds a waiting request to a forecast.
    pub(super) fn add_growth(&self, growth: &mut Trajectory, waiting: &WaitingRequest) {
        if self.config.policy.forecasts() {
            let known = waiting.request.prompt.len() as u32;
            let age = waiting.num_outputs();
            let most = waiting.request.max_tokens - age;
            let prompt = waiting.progress.prompt_tokens;
            let held = self.config.known_blocks(known, prompt, waiting.request.max_tokens);
            let tenant = &waiting.request.tenant;
            let lengths = self.compartments[tenant.compartment].lengths.of(tenant.index);
            self.add_sequence(growth, lengths, (known, held as f32), age, most);
            let common = waiting.num_common(self.config.block_size);
            self.add_others(growth, lengths, (known, common), &waiting.branches, waiting.request.n, most);
        }
    }

    /// Adds what a sequence of `known` tokens will split into besides itself: branches that have the first `common` ones
    /// in common with it, or samples. What they share counts with it.
    fn add_others(
        &self,
        growth: &mut Trajectory,
        lengths: &OutputLengths,
        (known, common): (u32, u32),
        branches: &[WaitingRequest],
        n: u32,
        most: u32,
    ) {
        for branch in branches {
            let (known, age) = (branch.request.prompt.len() as u32, branch.num_outputs());
            let held = (known - common) as f32 / self.config.block_size as f32;
            self.add_sequence(growth, lengths, (known, held), age, branch.request.max_tokens - age);
        }
        for _ in 1..n {
            self.add_sequence(growth, lengths, (known, 0.0), 0, most);
        }
    }

    /// What a compartment's sequences that run will grow by.
    pub(super) fn growth_of_running(&self, compartment: usize) -> Trajectory {
        let mut growth = Trajectory::default();
        if self.config.policy.forecasts() {
            let learned = &self.compartments[compartment].lengths;
            for sequence in self.running_of(compartment).iter().chain(self.parked_of(compartment)) {
                let age = sequence.num_outputs();
                let known = sequence.tokens.len() as u32;
                let held = match sequence.layers {
                    None => known as f32 / self.config.block_size as f32,
                    // It will have its tail again.
                    Some(_) => {
                        sequence.parked.as_ref().map_or(0, |parked| parked.blocks.len()) as f32
                            + sequence.num_held() as f32
                    }
                };
                let most = sequence.request.max_tokens - age;
                let lengths = learned.of(sequence.request.tenant.index);
                // What the branches of a set share counts with its eldest.
                let is_counted = !sequence.is_branch || self.sets.eldest(sequence.id) == sequence.id;
                let shared = if is_counted { 0.0 } else { (sequence.num_shared as f32).min(held) };
                self.add_sequence(&mut growth, lengths, (known, held - shared), age, most);
                let (branches, common) = (sequence.branches(), sequence.num_common() as u32);
                self.add_others(&mut growth, lengths, (known, common), branches, sequence.request.n, most);
            }
        }
        growth
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
