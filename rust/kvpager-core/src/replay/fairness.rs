//! How evenly tenants are served while they compete.

/// One tenant's standing against another, while both have requests that wait.
#[derive(Clone, Copy, Default)]
struct Pair {
    /// Service that the other is ahead since both began to wait, and the least so far; `None` while they do not.
    lead: Option<(i64, i64)>,
    /// Most that the other gained in any stretch in which both waited.
    worst: i64,
}

/// For every two tenants, the most service that one got more than the other in any stretch of time in which both
/// had requests waiting. A fair scheduler bounds it whatever the load; see VTC (OSDI'24).
pub(super) struct ServiceGaps {
    num_tenants: usize,
    /// Row: who falls behind. Column: who gets ahead.
    pairs: Vec<Pair>,
}

impl ServiceGaps {
    pub(super) fn new(num_tenants: usize) -> Self {
        Self { num_tenants, pairs: vec![Pair::default(); num_tenants * num_tenants] }
    }

    /// Notes a step: the service of each tenant, and who had requests waiting.
    pub(super) fn record(&mut self, served: &[u64], backlogged: &[bool]) {
        let n = self.num_tenants;
        for behind in 0..n {
            for ahead in (0..n).filter(|&ahead| ahead != behind) {
                let pair = &mut self.pairs[behind * n + ahead];
                if !(backlogged[behind] && backlogged[ahead]) {
                    pair.lead = None;
                    continue;
                }
                let (lead, least) = pair.lead.unwrap_or_default();
                let lead = lead + served[ahead] as i64 - served[behind] as i64;
                pair.worst = pair.worst.max(lead - least);
                pair.lead = Some((lead, least.min(lead)));
            }
        }
    }

    /// Most service that a tenant fell behind any other.
    pub(super) fn worst(&self, tenant: usize) -> u64 {
        let row = &self.pairs[tenant * self.num_tenants..(tenant + 1) * self.num_tenants];
        row.iter().map(|pair| pair.worst).max().unwrap_or(0).max(0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_counts_only_while_both_wait() {
        let mut gaps = ServiceGaps::new(2);
        gaps.record(&[100, 0], &[true, false]);
        assert_eq!((gaps.worst(0), gaps.worst(1)), (0, 0));
        gaps.record(&[100, 10], &[true, true]);
        gaps.record(&[0, 60], &[true, true]);
        // Tenant 1 fell 90 behind, then gained 60 on tenant 0.
        assert_eq!((gaps.worst(0), gaps.worst(1)), (60, 90));
        gaps.record(&[0, 0], &[false, true]);
        gaps.record(&[80, 0], &[true, true]);
        assert_eq!(gaps.worst(1), 90, "a new stretch starts at nothing");
    }
}
