//! The split plan: which block of threads attends which rows over which positions.
//!
//! A batch is ragged, a GPU wants equal pieces. A sequence's query rows are its (token, head of the group)
//! pairs; a tile is up to `tile_rows` of them and reads the positions that any of its rows may see. The plan
//! cuts long tiles into chunks of one length, chosen so that all chunks together are about `target_blocks`
//! thread blocks; the parts of a cut tile are joined by a merge. The numbers of items are data, read by the
//! kernels from memory, so a captured launch stays valid while lengths change; [`PlanShape::max_work`] bounds
//! them whatever the lengths are.

use crate::{Error, Result};

/// Chunk lengths are multiples of this many positions.
const CHUNK_STEP: u64 = 64;

/// What the plan must know of the kernel and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanShape {
    /// Query heads of one KV head.
    pub group: u32,
    /// Query rows of one work item.
    pub tile_rows: u32,
    /// KV heads; every work item is run once for each.
    pub num_kv_heads: u32,
    /// Visible positions before and including a row's own; 0: all.
    pub window: u32,
    /// Whether a row sees only positions up to its own.
    pub causal: bool,
    /// Only sequences with more rows than this are planned (0: all that have any).
    pub rows_above: u32,
    /// Only sequences with at most this many rows are planned.
    pub rows_up_to: u32,
    /// Thread blocks that fill the device.
    pub target_blocks: u32,
    /// Shortest chunk worth a block of its own, in positions.
    pub min_chunk: u32,
}

/// Rows `first_row..` of a sequence over positions `kv_begin..kv_end`; eight words, as the kernels read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct WorkItem {
    /// Index in the batch.
    pub sequence: i32,
    /// First row of the tile.
    pub first_row: i32,
    /// First position.
    pub kv_begin: i32,
    /// One past the last position.
    pub kv_end: i32,
    /// Slot of the partial result, or -1: the item writes the output itself.
    pub partial: i32,
    /// Zero.
    pub unused: [i32; 3],
}

/// Partial results that make one tile's output; four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MergeItem {
    /// Index in the batch.
    pub sequence: i32,
    /// First row of the tile.
    pub first_row: i32,
    /// Its partial results are `first_partial..first_partial + num_partials`.
    pub first_partial: i32,
    /// At least 2.
    pub num_partials: i32,
}

/// Work of one kernel over one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SplitPlan {
    /// One thread block each (and KV head), longest sequences' chunks in order.
    pub work: Vec<WorkItem>,
    /// One for each tile that was cut.
    pub merges: Vec<MergeItem>,
    /// Slots for partial results.
    pub num_partials: u32,
}

/// Rows `first_row..` and the positions that they may see.
struct Tile {
    sequence: i32,
    first_row: u32,
    begin: u32,
    end: u32,
}

impl PlanShape {
    /// The most work items that a batch of `max_sequences` with `max_tokens` query tokens can need.
    pub fn max_work(&self, max_sequences: u32, max_tokens: u32) -> u64 {
        let rows = u64::from(max_tokens) * u64::from(self.group);
        let tiles = rows / u64::from(self.tile_rows.max(1)) + u64::from(max_sequences).min(rows);
        // A chunk is at least total / (target / heads) long, so cutting adds at most target / heads items.
        tiles + u64::from(self.target_blocks / self.num_kv_heads.max(1))
    }

    fn validate(&self) -> Result<()> {
        let zero =
            [("group", self.group), ("tile_rows", self.tile_rows), ("num_kv_heads", self.num_kv_heads)];
        match zero.iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(Error::invalid(format!("{name} of a split plan must be positive, is 0"))),
            None => Ok(()),
        }
    }

    /// Positions that the rows of tokens `first..=last` see.
    fn visible(&self, query_len: u32, context_len: u32, first: u32, last: u32) -> (u32, u32) {
        let position = |token: u32| i64::from(context_len) - i64::from(query_len) + i64::from(token);
        let end = if self.causal { position(last) + 1 } else { i64::from(context_len) };
        let begin = if self.window > 0 { position(first) + 1 - i64::from(self.window) } else { 0 };
        let end = end.max(0);
        // Both fit: they lie in 0..=context_len.
        (begin.clamp(0, end) as u32, end as u32)
    }
}

impl SplitPlan {
    /// Plans a batch. Padding sequences (no rows) get no work; a row that sees nothing still gets an item,
    /// which writes zeros.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the arrays do not fit each other or hold negative lengths.
    ///
    /// # Complexity
    /// Linear in the work items.
    pub fn new(query_start: &[i32], context_lens: &[i32], shape: &PlanShape) -> Result<Self> {
        Self::from_positions(query_start, context_lens, None, shape)
    }

    /// [`SplitPlan::new`] that leaves out the first positions of each sequence: `kv_starts[i]` of sequence
    /// `i`, attended elsewhere (a shared prefix).
    ///
    /// # Errors
    /// As [`SplitPlan::new`].
    pub fn from_positions(
        query_start: &[i32],
        context_lens: &[i32],
        kv_starts: Option<&[i32]>,
        shape: &PlanShape,
    ) -> Result<Self> {
        shape.validate()?;
        let mut tiles = tiles(query_start, context_lens, shape)?;
        if let Some(starts) = kv_starts {
            leave_out(&mut tiles, context_lens, starts)?;
        }
        let chunk = chunk_length(&tiles, shape);
        let mut plan = Self::default();
        for tile in &tiles {
            plan.add_tile(tile, chunk);
        }
        Ok(plan)
    }

    fn add_tile(&mut self, tile: &Tile, chunk: u64) {
        let length = u64::from(tile.end - tile.begin);
        let pieces = length.div_ceil(chunk).max(1) as u32;
        // Equal pieces, so that the last one is not a splinter.
        let step = length.div_ceil(u64::from(pieces)).next_multiple_of(CHUNK_STEP).max(CHUNK_STEP);
        let pieces = length.div_ceil(step).max(1) as u32;
        let first_partial = self.num_partials as i32;
        for piece in 0..pieces {
            let begin = u64::from(tile.begin) + u64::from(piece) * step;
            self.work.push(WorkItem {
                sequence: tile.sequence,
                first_row: tile.first_row as i32,
                kv_begin: begin as i32,
                kv_end: (begin + step).min(u64::from(tile.end)) as i32,
                partial: if pieces > 1 { first_partial + piece as i32 } else { -1 },
                unused: [0; 3],
            });
        }
        if pieces > 1 {
            self.num_partials += pieces;
            self.merges.push(MergeItem {
                sequence: tile.sequence,
                first_row: tile.first_row as i32,
                first_partial,
                num_partials: pieces as i32,
            });
        }
    }
}

fn tiles(query_start: &[i32], context_lens: &[i32], shape: &PlanShape) -> Result<Vec<Tile>> {
    if query_start.len() != context_lens.len() + 1 {
        return Err(Error::invalid(format!(
            "query_start must have length {}, has {}",
            context_lens.len() + 1,
            query_start.len()
        )));
    }
    let mut tiles = Vec::new();
    for (sequence, (bounds, &context_len)) in query_start.windows(2).zip(context_lens).enumerate() {
        let query_len = i64::from(bounds[1]) - i64::from(bounds[0]);
        if query_len < 0 || bounds[0] < 0 || context_len < 0 {
            return Err(Error::invalid(format!(
                "sequence {sequence} has query tokens {}..{} and context length {context_len}",
                bounds[0], bounds[1]
            )));
        }
        let (query_len, context_len) = (query_len as u32, context_len as u32);
        let rows = u64::from(query_len) * u64::from(shape.group);
        if rows <= u64::from(shape.rows_above) || rows > u64::from(shape.rows_up_to) {
            continue;
        }
        let rows =
            u32::try_from(rows).map_err(|_| Error::invalid(format!("sequence {sequence}: {rows} rows")))?;
        for first_row in (0..rows).step_by(shape.tile_rows as usize) {
            let last_row = first_row.saturating_add(shape.tile_rows).min(rows) - 1;
            let (first, last) = (first_row / shape.group, last_row / shape.group);
            let (begin, end) = shape.visible(query_len, context_len, first, last);
            tiles.push(Tile { sequence: sequence as i32, first_row, begin, end });
        }
    }
    Ok(tiles)
}

/// Moves the first position of each tile to its sequence's start.
fn leave_out(tiles: &mut [Tile], context_lens: &[i32], starts: &[i32]) -> Result<()> {
    if starts.len() != context_lens.len() || starts.iter().any(|&start| start < 0) {
        return Err(Error::invalid(format!(
            "kv_starts must hold {} positions, none negative; it has {}",
            context_lens.len(),
            starts.len()
        )));
    }
    for tile in tiles {
        let start = starts[tile.sequence as usize] as u32;
        tile.begin = tile.begin.max(start).min(tile.end);
    }
    Ok(())
}

/// The chunk length that makes about `target_blocks` thread blocks, if the tiles alone do not.
fn chunk_length(tiles: &[Tile], shape: &PlanShape) -> u64 {
    let total: u64 = tiles.iter().map(|tile| u64::from(tile.end - tile.begin)).sum();
    let items = u64::from((shape.target_blocks / shape.num_kv_heads).max(1));
    let floor = u64::from(shape.min_chunk).max(CHUNK_STEP);
    total.div_ceil(items).max(floor).next_multiple_of(CHUNK_STEP)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(group: u32, tile_rows: u32) -> PlanShape {
        PlanShape {
            group,
            tile_rows,
            num_kv_heads: 2,
            window: 0,
            causal: true,
            rows_above: 0,
            rows_up_to: u32::MAX,
            target_blocks: 16,
            min_chunk: 64,
        }
    }

    #[test]
    fn one_long_sequence_is_cut_into_as_many_blocks_as_the_device_has() {
        let plan = SplitPlan::new(&[0, 1], &[4096], &shape(4, 4)).expect("valid");
        assert_eq!(plan.work.len(), 8, "16 blocks over 2 heads");
        assert_eq!(plan.merges.len(), 1);
        assert_eq!(plan.num_partials, 8);
    }

    #[test]
    fn padding_sequences_get_no_work() {
        let plan = SplitPlan::new(&[0, 1, 1, 1], &[5, 0, 0], &shape(1, 1)).expect("valid");
        assert_eq!(plan.work.len(), 1);
        assert_eq!(SplitPlan::new(&[0], &[], &shape(1, 1)).expect("valid"), SplitPlan::default());
    }

    #[test]
    fn positions_before_a_sequences_start_are_left_out() {
        let plan =
            SplitPlan::from_positions(&[0, 1, 2], &[100, 40], Some(&[64, 64]), &shape(1, 1)).expect("valid");
        let spans: Vec<_> = plan.work.iter().map(|w| (w.kv_begin, w.kv_end)).collect();
        assert_eq!(spans, [(64, 100), (40, 40)]);
        assert!(SplitPlan::from_positions(&[0, 1], &[5], Some(&[]), &shape(1, 1)).is_err());
    }

    #[test]
    fn arrays_that_do_not_fit_are_refused() {
        for (starts, lens) in [(vec![0, 1], vec![1, 2]), (vec![1, 0], vec![1]), (vec![0, 1], vec![-1])] {
            assert!(matches!(SplitPlan::new(&starts, &lens, &shape(1, 1)), Err(Error::InvalidArgument(_))));
        }
    }

    proptest! {
        /// Every visible (row, position) is covered exactly once, and the counts keep the promised bound.
        #[test]
        fn every_visible_position_is_attended_exactly_once(
            sequences in prop::collection::vec((0u32..9, 0u32..700), 0..6),
            group in 1u32..5, tile_rows in 1u32..9, window in 0u32..80, causal: bool, target in 1u32..64,
        ) {
            let mut starts = vec![0i32];
            let mut lens = Vec::new();
            for &(query, context) in &sequences {
                starts.push(starts[starts.len() - 1] + query as i32);
                lens.push(context as i32);
            }
            let window = if causal { window } else { 0 };
            let shape = PlanShape { causal, window, target_blocks: target, ..shape(group, tile_rows) };
            let plan = SplitPlan::new(&starts, &lens, &shape).expect("valid");
            let tokens = starts[starts.len() - 1] as u32;
            prop_assert!(plan.work.len() as u64 <= shape.max_work(sequences.len() as u32, tokens));
            for (s, &(query, context)) in sequences.iter().enumerate() {
                for token in 0..query {
                    let (begin, end) = shape.visible(query, context, token, token);
                    for row in token * group..(token + 1) * group {
                        let tile = row / tile_rows * tile_rows;
                        let mut spans: Vec<(i32, i32)> = plan.work.iter()
                            .filter(|w| w.sequence == s as i32 && w.first_row == tile as i32)
                            .map(|w| (w.kv_begin, w.kv_end)).collect();
                        spans.sort_unstable();
                        prop_assert!(!spans.is_empty());
                        prop_assert!(spans.windows(2).all(|pair| pair[0].1 == pair[1].0));
                        if begin < end {
                            prop_assert!(spans[0].0 <= begin as i32 && spans[spans.len() - 1].1 >= end as i32);
                        }
                    }
                }
            }
            let mut partials: Vec<i32> = plan.work.iter().map(|w| w.partial).filter(|&p| p >= 0).collect();
            partials.sort_unstable();
            prop_assert_eq!(partials, (0..plan.num_partials as i32).collect::<Vec<_>>());
            let merged: i32 = plan.merges.iter().map(|m| m.num_partials).sum();
            prop_assert_eq!(merged, plan.num_partials as i32);
        }
    }
}
