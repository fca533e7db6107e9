//! Whose outputs are how long: of each tenant its own, where it has shown enough, else what all have shown
//! together.
//!
//! A tenant of which `MIN_OUTPUTS` outputs are in the shared window or run has statistics of its own, beside those
//! of all, from the next look on: its part of the shared window to begin with, then its own window, drift and
//! caution, and `PRIOR_WEIGHT` imaginary outputs that end as those of all do. If only one tenant has shown
//! anything, there is nothing to tell apart, and what all have shown is its own.
//!
//! At most [`MAX_OWN`] tenants have their own; one more takes the place of a tenant that has shown nothing for
//! longest and runs nothing, or is taken for one of all.

use super::survival::OutputLengths;

/// Outputs of a tenant, ended or running, that make it worth statistics of its own.
const MIN_OUTPUTS: u32 = 16;
/// Tenants that have their own: some 14 KB each.
const MAX_OWN: usize = 64;
/// Steps between two tenants whose tables are filled.
const FILL_STEPS: u64 = 4;
/// No place in `LearnedLengths::own`.
const NONE: u32 = u32::MAX;

/// What one tenant has shown.
#[derive(Clone, Copy, Debug)]
struct Shown {
    /// Outputs in the shared window.
    num_ended: u32,
    /// Sequences that ran at the last look.
    num_running: u32,
    /// Place of its own statistics.
    own: u32,
}

/// Statistics of one tenant.
#[derive(Debug)]
struct Own {
    tenant: u32,
    lengths: OutputLengths,
    /// Whether the rates have changed since the tables were filled.
    is_due: bool,
    /// The look whose rates the tables were filled by; 0 if they have not been.
    filled: u64,
    /// The last look by which the tenant had shown something.
    last_shown: u64,
}

/// What a compartment's tenants have shown.
#[derive(Debug, Default)]
pub(in crate::scheduler) struct LearnedLengths {
    shared: OutputLengths,
    /// Whose the outputs in the shared window are, place by place.
    owners: Vec<u32>,
    /// By tenant.
    shown: Vec<Shown>,
    own: Vec<Own>,
    num_looks: u64,
    /// The step that last filled the tables of a tenant.
    filled_at: u64,
}

impl LearnedLengths {
    /// What is known of a tenant's outputs.
    pub(in crate::scheduler) fn of(&self, tenant: usize) -> &OutputLengths {
        let own = self.shown.get(tenant).and_then(|shown| self.own.get(shown.own as usize));
        own.filter(|own| own.filled > 0).map_or(&self.shared, |own| &own.lengths)
    }

    /// An output of a tenant ended by itself. It had been counted up to an age.
    pub(in crate::scheduler) fn learn(&mut self, tenant: usize, known_age: u32, length: u32) {
        self.shared.expose(known_age, length);
        let place = self.shared.learn(length);
        match self.owners.get_mut(place) {
            Some(owner) => {
                let old = std::mem::replace(owner, tenant as u32);
                self.shown[old as usize].num_ended -= 1;
            }
            None => self.owners.push(tenant as u32),
        }
        self.shown_mut(tenant).num_ended += 1;
        if let Some(own) = self.own_mut(tenant) {
            own.lengths.expose(known_age, length);
            own.lengths.learn(length);
        }
    }

    /// Works the rates out again. `running` are the sequences that have not ended: tenant, the age up to which
    /// each has been counted, and its age.
    pub(in crate::scheduler) fn look(&mut self, running: impl Iterator<Item = (usize, u32, u32)>) {
        self.num_looks += 1;
        self.take_in_another();
        self.shown.iter_mut().for_each(|shown| shown.num_running = 0);
        for (tenant, from, to) in running {
            self.shared.expose_running(from, to);
            self.shown_mut(tenant).num_running += 1;
            if let Some(own) = self.own_mut(tenant) {
                own.lengths.expose_running(from, to);
            }
        }
        self.shared.rebuild(None);
        self.shared.tabulate();
        let shown_since = |own: &&mut Own| own.last_shown + 1 >= self.num_looks;
        for own in self.own.iter_mut().filter(shown_since) {
            own.lengths.rebuild(Some(&self.shared));
            own.is_due = true;
        }
    }

    /// Fills the tables of the tenant that has waited for it longest, if one does. That is the dear part of a
    /// look, so one step in `FILL_STEPS` does it, for one tenant: with many tenants each is looked at less often.
    pub(in crate::scheduler) fn fill_next(&mut self, step: u64) {
        if step < self.filled_at + FILL_STEPS {
            return;
        }
        self.filled_at = step;
        if let Some(own) = self.own.iter_mut().filter(|own| own.is_due).min_by_key(|own| own.filled) {
            own.lengths.tabulate();
            (own.is_due, own.filled) = (false, self.num_looks);
        }
    }

    /// Gives statistics of its own to the tenant that has shown most of those without, if it is enough, is not all
    /// there is, and there is a place.
    fn take_in_another(&mut self) {
        let outputs = |shown: &Shown| shown.num_ended + shown.num_running;
        let others = self.shown.iter().enumerate().filter(|(_, shown)| shown.own == NONE);
        let Some((tenant, most)) =
            others.map(|(tenant, shown)| (tenant, outputs(shown))).max_by_key(|&(_, n)| n)
        else {
            return;
        };
        if most < MIN_OUTPUTS || most == self.shown.iter().map(outputs).sum::<u32>() {
            return;
        }
        let Some(place) = self.free_place() else { return };
        let mut lengths = OutputLengths::empty();
        lengths.take_part(&self.shared, |place| self.owners[place] as usize == tenant);
        let last_shown = self.num_looks;
        let own = Own { tenant: tenant as u32, lengths, is_due: false, filled: 0, last_shown };
        match self.own.get_mut(place) {
            Some(old) => *old = own,
            None => self.own.push(own),
        }
        self.shown[tenant].own = place as u32;
    }

    /// A place for statistics: a new one, or that of the tenant that has been silent longest.
    fn free_place(&mut self) -> Option<usize> {
        if self.own.len() < MAX_OWN {
            return Some(self.own.len());
        }
        let silent = self.own.iter().enumerate().filter(|(_, own)| own.last_shown + 1 < self.num_looks);
        let (place, old) = silent.min_by_key(|(_, own)| own.last_shown)?;
        self.shown[old.tenant as usize].own = NONE;
        Some(place)
    }

    fn shown_mut(&mut self, tenant: usize) -> &mut Shown {
        if tenant >= self.shown.len() {
            self.shown.resize(tenant + 1, Shown { num_ended: 0, num_running: 0, own: NONE });
        }
        &mut self.shown[tenant]
    }

    /// The statistics of a tenant that shows something now.
    fn own_mut(&mut self, tenant: usize) -> Option<&mut Own> {
        let place = self.shown.get(tenant)?.own;
        let own = self.own.get_mut(place as usize)?;
        own.last_shown = self.num_looks;
        Some(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::policy::survival::NUM_HORIZONS;

    /// The next step that fills a table.
    fn fill(learned: &mut LearnedLengths) {
        let step = learned.filled_at + FILL_STEPS;
        learned.fill_next(step);
        // Too soon for another.
        learned.fill_next(step + FILL_STEPS - 1);
    }

    /// Outputs of a tenant that end one after the other, each beside eight that have got half as far, and looks at
    /// them.
    fn show(learned: &mut LearnedLengths, tenant: usize, length: u32, count: u32) {
        for i in 0..count {
            learned.learn(tenant, 0, length - i % 5);
            if i % 8 == 7 {
                learned.look((0..8).map(|_| (tenant, length / 2, length / 2)));
                fill(learned);
            }
        }
    }

    /// Chance that a new output of a tenant has 256 tokens or more.
    fn long(learned: &LearnedLengths, tenant: usize) -> f32 {
        learned.of(tenant).survival(0)[6]
    }

    fn bits(lengths: &OutputLengths) -> Vec<[u32; NUM_HORIZONS]> {
        (0..4096).step_by(64).map(|age| lengths.survival(age).map(f32::to_bits)).collect()
    }

    #[test]
    fn of_one_tenant_is_known_what_is_known_of_all_to_the_last_bit() {
        let (mut learned, mut plain) = (LearnedLengths::default(), OutputLengths::default());
        for i in 0..5000u32 {
            let length = 20 + i * 7919 % 900;
            learned.learn(3, length / 2, length);
            plain.expose(length / 2, length);
            plain.learn(length);
            if i % 40 == 0 {
                learned.look((0..30).map(|age| (3, age * 9, age * 10)));
                fill(&mut learned);
                (0..30).for_each(|age| plain.expose_running(age * 9, age * 10));
                plain.rebuild(None);
                plain.tabulate();
                assert_eq!(bits(learned.of(3)), bits(&plain));
            }
        }
        assert!(learned.own.is_empty());
    }

    #[test]
    fn tenants_with_outputs_of_different_lengths_are_told_apart() {
        let mut learned = LearnedLengths::default();
        for _ in 0..5 {
            show(&mut learned, 0, 50, 40);
            show(&mut learned, 1, 2000, 40);
        }
        assert!(long(&learned, 0) < 0.1, "{}", long(&learned, 0));
        assert!(long(&learned, 1) > 0.9, "{}", long(&learned, 1));
        // Half of all.
        assert!((0.3..0.7).contains(&long(&learned, 2)), "{}", long(&learned, 2));
        // Eight times as many short ones make the long ones no shorter.
        show(&mut learned, 0, 50, 2000);
        assert!(long(&learned, 1) > 0.9, "{}", long(&learned, 1));
        assert!(long(&learned, 2) < 0.1, "{}", long(&learned, 2));
    }

    #[test]
    fn a_tenant_with_few_outputs_is_like_all_and_the_more_it_has_shown_the_less() {
        let mut learned = LearnedLengths::default();
        show(&mut learned, 0, 50, 400);
        let shared = long(&learned, 0);
        learned.learn(1, 0, 2000);
        learned.look(std::iter::empty());
        assert_eq!(long(&learned, 1), long(&learned, 9), "one output is too few");
        let known: Vec<f32> = [16, 40, 200]
            .map(|count| {
                show(&mut learned, 1, 2000, count);
                learned.look(std::iter::empty());
                fill(&mut learned);
                fill(&mut learned);
                long(&learned, 1)
            })
            .into();
        assert!(shared < known[0] && known[0] < known[1] && known[1] < known[2], "{shared} {known:?}");
    }

    #[test]
    fn what_runs_tells_of_a_tenant_before_anything_of_it_has_ended() {
        let mut learned = LearnedLengths::default();
        show(&mut learned, 0, 50, 800);
        for age in 1..8 {
            learned.look((0..32).map(|_| (1, age * 100 - 100, age * 100)));
            fill(&mut learned);
            fill(&mut learned);
        }
        let (short, long) = (long(&learned, 0), long(&learned, 1));
        assert!(short < 0.3 && long > 0.8, "{short} {long}");
    }

    #[test]
    fn one_step_in_four_fills_the_tables_of_one_tenant_and_they_take_turns() {
        let mut learned = LearnedLengths::default();
        let look = |learned: &mut LearnedLengths| {
            learned.look((0..6).flat_map(|tenant| (0..MIN_OUTPUTS).map(move |_| (tenant, 0, 10))));
        };
        (0..8).for_each(|_| look(&mut learned));
        for left in (0..6).rev() {
            fill(&mut learned);
            assert_eq!(learned.own.iter().filter(|own| own.is_due).count(), left);
        }
        // Two between two looks: each has its turn at every third look.
        for _ in 0..3 {
            look(&mut learned);
            fill(&mut learned);
            fill(&mut learned);
        }
        assert!(learned.own.iter().all(|own| own.filled + 3 > learned.num_looks));
        // Who has shown nothing since is as it was.
        learned.look(std::iter::empty());
        (0..6).for_each(|_| fill(&mut learned));
        learned.look(std::iter::empty());
        assert!(learned.own.iter().all(|own| !own.is_due));
    }

    #[test]
    fn one_tenant_more_than_may_have_their_own_takes_the_place_of_a_silent_one_or_is_like_all() {
        let mut learned = LearnedLengths::default();
        let runs = |tenants: std::ops::Range<usize>| {
            tenants.flat_map(|tenant| (0..MIN_OUTPUTS).map(move |_| (tenant, 0, 10))).collect::<Vec<_>>()
        };
        for _ in 0..=MAX_OWN + 2 {
            learned.look(runs(0..MAX_OWN + 1).into_iter());
            fill(&mut learned);
        }
        let without = |learned: &LearnedLengths| {
            let without: Vec<usize> = (0..=MAX_OWN)
                .filter(|&tenant| std::ptr::eq(learned.of(tenant), &raw const learned.shared))
                .collect();
            without
        };
        let [left] = without(&learned)[..] else { panic!("{:?}", without(&learned)) };
        assert_eq!(learned.own.len(), MAX_OWN);
        // All but one go on: it loses its own to the one that was left out.
        let silent = (left + 1) % (MAX_OWN + 1);
        for _ in 0..4 {
            let others = runs(0..MAX_OWN + 1).into_iter().filter(|(tenant, ..)| *tenant != silent);
            learned.look(others);
            fill(&mut learned);
        }
        while learned.own.iter().any(|own| own.is_due) {
            fill(&mut learned);
        }
        assert_eq!(without(&learned), [silent]);
        assert_eq!(learned.own.len(), MAX_OWN);
    }
}
