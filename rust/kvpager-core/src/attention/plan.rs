//! Cutting a batch into jobs.
//!
//! A *strip* is up to [`MAX_ROWS`] query rows (tokens times query heads of one KV head) that read the same
//! blocks; a *piece* is a key range cut at multiples of [`PIECE`] positions. A job computes one strip for some KV
//! heads, over all of its pieces or over one. Where the cuts of keys lie depends on positions alone, so that
//! results do not depend on the number of threads; which jobs exist does.

use super::batch::Sequence;
use super::request::Checked;
use crate::{Error, Result};
use std::ops::Range;

/// Query rows of one KV head that a strip holds, unless one token has more.
const MAX_ROWS: usize = 64;

/// Positions of a key range.
pub(super) const PIECE: usize = 1024;

/// Jobs to make for each thread, so that unequal ones even out.
const JOBS_PER_THREAD: usize = 4;

/// Floats of running state that one job may hold, to stay in a core's own cache.
const MAX_STATE: usize = 128 * 1024;

/// A query token and the positions that it sees.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) token: usize,
    pub(super) position: usize,
    pub(super) low: usize,
    pub(super) high: usize,
}

/// Query tokens that read the same blocks.
pub(super) struct Strip {
    /// Range of `Checked::rows`.
    pub(super) rows: Range<usize>,
    /// Where the strip's block ids start in `Checked::blocks`; the first holds position `first_position`.
    pub(super) blocks: usize,
    pub(super) first_position: usize,
    /// Positions that any row sees.
    pub(super) low: usize,
    pub(super) high: usize,
}

impl Strip {
    /// The key ranges, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (low, high) = (self.low, self.high);
        (low / PIECE..high.div_ceil(PIECE))
            .map(move |index| low.max(index * PIECE)..high.min((index + 1) * PIECE))
    }

    fn num_pieces(&self) -> usize {
        self.high.div_ceil(PIECE) - self.low / PIECE
    }
}

/// One unit of work.
pub(super) struct Job {
    pub(super) strip: usize,
    pub(super) heads: Range<usize>,
    /// Number of the piece, or all of them.
    pub(super) piece: Option<usize>,
    /// Where the partial state goes: index of a partial, or straight to the output.
    pub(super) partial: Option<usize>,
    cost: usize,
}

/// Jobs of a batch and the partial states they leave.
pub(super) struct Plan {
    pub(super) jobs: Vec<Job>,
    /// Row slots of partial states, of `num_query_heads` states each: first slot of each partial.
    pub(super) partial_start: Vec<usize>,
    pub(super) num_slots: usize,
    /// `[num_strips]`: partials of each strip, in the order of their keys; empty if it writes the output.
    pub(super) strip_partials: Vec<Range<usize>>,
}

/// Fills rows, strips and block ids of a checked request.
pub(super) fn lay_out(checked: &mut Checked<'_>, sequences: &[Sequence]) -> Result<()> {
    let split = shared_lengths(checked, sequences)?;
    if let Some(shared) = &checked.request.shared {
        for (group, &length) in shared.prefix_lens.iter().enumerate() {
            let members = shared.group_start[group] as usize..shared.group_start[group + 1] as usize;
            let members: Vec<_> = shared.sequences[members].iter().map(|&i| sequences[i as usize]).collect();
            add_prefix(checked, &members, length as usize)?;
        }
    }
    for (sequence, &from) in sequences.iter().zip(&split) {
        add_sequence(checked, sequence, from)?;
    }
    Ok(())
}

/// For each sequence, the positions that a shared prefix covers. Checks the groups.
fn shared_lengths(checked: &Checked<'_>, sequences: &[Sequence]) -> Result<Vec<usize>> {
    let mut lengths = vec![0; sequences.len()];
    let Some(shared) = &checked.request.shared else { return Ok(lengths) };
    let block_size = checked.request.k_cache.shape()[1];
    let starts = shared.group_start;
    let ordered = starts.windows(2).all(|pair| pair[0] <= pair[1]);
    if starts.len() != shared.prefix_lens.len() + 1
        || starts[0] != 0
        || !ordered
        || starts[starts.len() - 1] as usize != shared.sequences.len()
    {
        return Err(Error::invalid(format!(
            "group_start {starts:?} does not cut {} into {}",
            crate::count_of(shared.sequences.len(), "member"),
            crate::count_of(shared.prefix_lens.len(), "group")
        )));
    }
    for (group, &length) in shared.prefix_lens.iter().enumerate() {
        for &member in &shared.sequences[starts[group] as usize..starts[group + 1] as usize] {
            let sequence = usize::try_from(member).ok().and_then(|member| sequences.get(member));
            let sequence = sequence.ok_or_else(|| {
                Error::invalid(format!("group {group} names sequence {member} of {}", sequences.len()))
            })?;
            let room = sequence.context.saturating_sub(sequence.end - sequence.start);
            if length <= 0 || !(length as usize).is_multiple_of(block_size) || length as usize > room {
                return Err(Error::invalid(format!(
                    "prefix_lens[{group}] is {length}, but sequence {member} has {} before its first \
                     query, in blocks of {block_size}",
                    crate::count_of(room, "token")
                )));
            }
            if std::mem::replace(&mut lengths[sequence.index], length as usize) != 0 {
                return Err(Error::invalid(format!("sequence {member} is in two groups")));
            }
        }
    }
    Ok(lengths)
}

/// Visible positions of a sequence's tokens, cut to those in `from..to`.
fn rows_of(checked: &Checked<'_>, sequence: &Sequence, from: usize, to: usize) -> impl Iterator<Item = Row> {
    let options = checked.request.options;
    let (sequence, first) = (*sequence, sequence.context + sequence.start - sequence.end);
    (sequence.start..sequence.end).map(move |token| {
        let position = first + token - sequence.start;
        let end = if options.causal { position + 1 } else { sequence.context };
        let start = options.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
        Row { token, position, low: start.max(from), high: end.min(to) }
    })
}

fn add_sequence(checked: &mut Checked<'_>, sequence: &Sequence, from: usize) -> Result<()> {
    if sequence.context == 0 {
        return Ok(());
    }
    let rows: Vec<Row> = rows_of(checked, sequence, from, usize::MAX).collect();
    add_strips(checked, sequence.row, rows)
}

/// Strips that read a prefix once for all members; every member's table must begin with the same blocks.
fn add_prefix(checked: &mut Checked<'_>, members: &[Sequence], length: usize) -> Result<()> {
    let Some(first) = members.first() else { return Ok(()) };
    let mut shared = Vec::new();
    checked.request.batch().row_blocks(first.row, 0, length, &mut shared)?;
    let mut rows = Vec::new();
    for member in members {
        let mut own = Vec::new();
        checked.request.batch().row_blocks(member.row, 0, length, &mut own)?;
        if let Some(column) = own.iter().zip(&shared).position(|(own, shared)| own != shared) {
            return Err(Error::invalid(format!(
                "sequences {} and {} do not share their first {length} tokens: entry {column} is block {} and {}",
                first.index, member.index, shared[column], own[column]
            )));
        }
        rows.extend(rows_of(checked, member, 0, length).filter(|row| row.low < row.high));
    }
    add_strips(checked, first.row, rows)
}

fn add_strips(checked: &mut Checked<'_>, table_row: usize, rows: Vec<Row>) -> Result<()> {
    let block_size = checked.request.k_cache.shape()[1];
    let tokens = (MAX_ROWS / checked.group).max(1);
    let low = rows.iter().map(|row| row.low).min().unwrap_or(0);
    let high = rows.iter().map(|row| row.high).max().unwrap_or(0);
    let first_block = checked.blocks.len();
    checked.request.batch().row_blocks(table_row, low, high, &mut checked.blocks)?;
    for chunk in rows.chunks(tokens) {
        let start = checked.rows.len();
        checked.rows.extend_from_slice(chunk);
        checked.strips.push(Strip {
            rows: start..start + chunk.len(),
            blocks: first_block,
            first_position: low / block_size * block_size,
            low: chunk.iter().map(|row| row.low).min().unwrap_or(0),
            high: chunk.iter().map(|row| row.high).max().unwrap_or(0),
        });
    }
    Ok(())
}

/// Cuts the strips into jobs for `threads` threads, the costliest first.
pub(super) fn plan(checked: &Checked<'_>, threads: usize) -> Plan {
    let num_heads = checked.request.k_cache.shape()[2];
    let value_dim = checked.request.v_cache.shape()[3];
    let cost = |strip: &Strip| strip.rows.len() * (strip.high - strip.low) * num_heads;
    let total: usize = checked.strips.iter().map(cost).sum();
    let target = if threads == 1 { usize::MAX } else { total / (threads * JOBS_PER_THREAD) + 1 };
    let mut plan = Plan { jobs: vec![], partial_start: vec![], num_slots: 0, strip_partials: vec![] };
    for (index, strip) in checked.strips.iter().enumerate() {
        let state = strip.rows.len() * checked.group * value_dim;
        let by_cost = num_heads.saturating_mul(target) / cost(strip).max(1);
        let heads = by_cost.clamp(1, num_heads);
        let heads = heads.min((MAX_STATE / state).max(1));
        let pieces = if cost(strip) / num_heads > target { strip.num_pieces() } else { 1 };
        plan.add_jobs(index, strip, num_heads, heads, pieces, checked.cascades);
    }
    plan.jobs.sort_by_key(|job| std::cmp::Reverse(job.cost));
    plan
}

impl Plan {
    fn add_jobs(
        &mut self,
        index: usize,
        strip: &Strip,
        num_heads: usize,
        heads_per_job: usize,
        pieces: usize,
        keep: bool,
    ) {
        let first = self.partial_start.len();
        for piece in 0..pieces {
            let partial = (pieces > 1 || keep).then_some(self.partial_start.len());
            if partial.is_some() {
                self.partial_start.push(self.num_slots);
                self.num_slots += strip.rows.len();
            }
            let piece = (pieces > 1).then_some(piece);
            for start in (0..num_heads).step_by(heads_per_job) {
                let heads = start..num_heads.min(start + heads_per_job);
                let cost = strip.rows.len() * (strip.high - strip.low) * heads.len() / pieces;
                self.jobs.push(Job { strip: index, heads, piece, partial, cost });
            }
        }
        self.strip_partials.push(first..self.partial_start.len());
    }
}
