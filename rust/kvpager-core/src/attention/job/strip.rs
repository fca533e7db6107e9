//! One strip of query rows against its keys, tile by tile.
//!
//! A row of the kernels is (token i, query head g of the KV head), at `i * group + g`. For each tile the addresses
//! of its rows at head 0 are looked up once; heads then follow each other, so that a page of memory is used whole
//! while it is near, and the rows of the next head or tile are fetched meanwhile.

use super::{Access, Call, Shape, read_strided, token_factor};
use crate::attention::kernels::{Kernels, Storage, TILE, Tile};
use crate::attention::merge::State;
use crate::attention::plan::{Job, Row, Strip};
use crate::attention::scratch::Scratch;
use crate::attention::{Dtype, KvScale, Tensor};
use std::ops::Range;

/// Where the rows of one tile lie.
#[derive(Clone, Copy)]
struct TileRows {
    first: usize,
    num_keys: usize,
    /// Addresses at head 0; entries past `num_keys` repeat the last.
    keys: [*const u8; TILE],
    values: [*const u8; TILE],
    /// (block, offset) of each.
    slots: [(u32, u32); TILE],
}

/// Running states `[heads, rows]`.
#[derive(Clone, Copy)]
struct States {
    max: *mut f32,
    sum: *mut f32,
    acc: *mut f32,
}

/// A job at work.
pub(super) struct StripRun<'a> {
    call: &'a Call<'a>,
    shape: Shape,
    strip: &'a Strip,
    rows: &'a [Row],
    heads: Range<usize>,
    num_rows: usize,
    kernels: &'static Kernels,
    access: Access,
    scratch: &'a mut Scratch,
    query: *const f32,
    total: States,
}

impl<'a> StripRun<'a> {
    pub(super) fn new(call: &'a Call<'a>, job: &Job, scratch: &'a mut Scratch) -> Self {
        let (checked, shape) = (call.checked, call.shape);
        let strip = &checked.strips[job.strip];
        let rows = &checked.rows[strip.rows.clone()];
        let num_rows = rows.len() * shape.group;
        let access = match call.access() {
            // Half-width rows are decoded once for many query rows.
            Access::InPlace(storage) if storage != Storage::F32 && num_rows > 8 => Access::Staged,
            access => access,
        };
        let query = scratch.query.reserve(job.heads.len() * num_rows * shape.key_pad);
        let rooms = job.heads.len() * num_rows * (shape.value_pad + 2);
        let total = scratch.total.reserve(rooms + 2 * TILE);
        let mut run = Self {
            call,
            shape,
            strip,
            rows,
            heads: job.heads.clone(),
            num_rows,
            kernels: checked.kernels,
            access,
            scratch,
            query,
            total: States { max: total, sum: total, acc: total },
        };
        run.total = run.states(total);
        run.clear(run.total);
        run.pack_query(query);
        run
    }

    /// Lays states out in a buffer: accumulators first, for their alignment.
    fn states(&self, start: *mut f32) -> States {
        let rows = self.heads.len() * self.num_rows;
        let max = start.wrapping_add(rows * self.shape.value_pad);
        States { max, sum: max.wrapping_add(rows), acc: start }
    }

    fn clear(&self, states: States) {
        let rows = self.heads.len() * self.num_rows;
        // SAFETY: `states` laid out room for these in a buffer of that size.
        unsafe {
            std::slice::from_raw_parts_mut(states.max, rows).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(states.sum, rows).fill(0.0);
            std::slice::from_raw_parts_mut(states.acc, rows * self.shape.value_pad).fill(0.0);
        }
    }

    /// Writes the query rows as fp32, `[heads, rows, key_pad]`, padded with zeros.
    fn pack_query(&self, target: *mut f32) {
        let request = self.call.checked.request;
        let (dtype, stride) = (request.query.dtype(), request.query.strides()[2]);
        let mut at = target;
        for head in self.heads.clone() {
            for row in self.rows {
                for member in 0..self.shape.group {
                    let source = request.query.at([row.token, head * self.shape.group + member, 0]);
                    for index in 0..self.shape.key_pad {
                        // SAFETY: the element is inside `query`, and `target` has room for all rows.
                        unsafe {
                            let inside = index < self.shape.head_dim;
                            let value = if inside { read_strided(dtype, source, stride, index) } else { 0.0 };
                            at.add(self.shape.place(index)).write(value);
                        }
                    }
                    at = at.wrapping_add(self.shape.key_pad);
                }
            }
        }
    }

    /// Attends to the keys of one piece; `merge` keeps it apart first and then adds it to what is there.
    pub(super) fn attend_piece(&mut self, piece: Range<usize>, merge: bool) {
        if !merge {
            self.attend_range(piece, self.total);
            return;
        }
        let rooms = self.heads.len() * self.num_rows * (self.shape.value_pad + 2);
        let start = self.scratch.piece.reserve(rooms);
        let states = self.states(start);
        self.clear(states);
        self.attend_range(piece, states);
        for row in 0..self.heads.len() * self.num_rows {
            // SAFETY: the two buffers are different ones, and `row` is inside both.
            unsafe {
                let part = self.state(states, row);
                self.state(self.total, row).merge(*part.max, *part.sum, part.acc);
            }
        }
    }

    /// One state of the buffer.
    ///
    /// # Safety
    /// `row` is inside, and no other reference to the state is alive.
    unsafe fn state<'s>(&self, states: States, row: usize) -> State<'s> {
        // SAFETY: by the caller's promise; accumulators are `value_pad` apart.
        unsafe {
            let acc = states.acc.add(row * self.shape.value_pad);
            State {
                max: &mut *states.max.add(row),
                sum: &mut *states.sum.add(row),
                acc: std::slice::from_raw_parts_mut(acc, self.shape.value_pad),
            }
        }
    }

    fn attend_range(&mut self, range: Range<usize>, states: States) {
        let mut next = (!range.is_empty()).then(|| self.look_up(range.start, range.end));
        while let Some(tile) = next {
            let end = tile.first + tile.num_keys;
            next = (end < range.end).then(|| self.look_up(end, range.end));
            self.attend_tile(&tile, next.as_ref(), states);
        }
    }

    /// Addresses of the rows from position `first` to the next multiple of the tile's length, or to `end`.
    fn look_up(&self, first: usize, end: usize) -> TileRows {
        let (checked, request) = (self.call.checked, self.call.checked.request);
        let end = end.min((first / self.shape.tile + 1) * self.shape.tile);
        let mut tile = TileRows {
            first,
            num_keys: end - first,
            keys: [std::ptr::null(); TILE],
            values: [std::ptr::null(); TILE],
            slots: [(0, 0); TILE],
        };
        let (shift, mask) = (self.shape.block_size.trailing_zeros(), self.shape.block_size - 1);
        let blocks = &checked.blocks[self.strip.blocks..];
        for index in 0..tile.num_keys {
            let position = first + index;
            let id = blocks[(position - self.strip.first_position) >> shift];
            let offset = position & mask;
            tile.keys[index] = request.k_cache.at([id as usize, offset, 0, 0]);
            tile.values[index] = request.v_cache.at([id as usize, offset, 0, 0]);
            tile.slots[index] = (id, offset as u32);
        }
        let last = tile.num_keys - 1;
        let (key, value) = (tile.keys[last], tile.values[last]);
        tile.keys[last..].fill(key);
        tile.values[last..].fill(value);
        tile
    }

    /// Fills what the kernels need of each row in this tile; returns (slopes, distances).
    fn describe_rows(&mut self, tile: &TileRows, extra: *mut f32) -> (*const f32, *const f32) {
        let (slopes, distances) = (extra, extra.wrapping_add(self.num_rows));
        let end = tile.first + tile.num_keys;
        self.scratch.visible.clear();
        for row in self.rows {
            let low = row.low.clamp(tile.first, end) - tile.first;
            let high = row.high.clamp(tile.first, end) - tile.first;
            let span = [low as u32, high as u32];
            self.scratch.visible.extend(std::iter::repeat_n(span, self.shape.group));
        }
        if self.call.checked.request.options.alibi_slopes.is_some() {
            for (index, row) in self.rows.iter().enumerate() {
                let distance = (tile.first as i64 - row.position as i64) as f32;
                for member in 0..self.shape.group {
                    // SAFETY: `extra` has room for two floats a row.
                    unsafe { distances.add(index * self.shape.group + member).write(distance) };
                }
            }
        }
        (slopes, distances)
    }

    fn attend_tile(&mut self, tile: &TileRows, next: Option<&TileRows>, states: States) {
        let options = self.call.checked.request.options;
        let rows = self.num_rows;
        let scores = self.scratch.rows.reserve(rows * (TILE + 3));
        let rescale = scores.wrapping_add(rows * TILE);
        let (slopes, distances) = self.describe_rows(tile, rescale.wrapping_add(rows));
        for (number, head) in self.heads.clone().enumerate() {
            if let Some(values) = options.alibi_slopes {
                for row in 0..rows {
                    let slope = values[head * self.shape.group + row % self.shape.group];
                    // SAFETY: `describe_rows` was given room for a slope a row.
                    unsafe { slopes.cast_mut().add(row).write(slope) };
                }
            }
            let first_row = number * rows;
            let mut work = Tile {
                query: self.query.wrapping_add(first_row * self.shape.key_pad),
                num_rows: rows,
                key_dim: self.shape.key_pad,
                value_dim: self.shape.value_pad,
                keys: tile.keys.as_ptr(),
                values: tile.values.as_ptr(),
                key_offset: 0,
                value_offset: 0,
                num_keys: tile.num_keys,
                next_keys: std::ptr::null(),
                next_values: std::ptr::null(),
                next_key_offset: 0,
                next_value_offset: 0,
                visible: self.scratch.visible.as_ptr(),
                slopes,
                distances,
                has_slopes: options.alibi_slopes.is_some(),
                scale: options.scale * self.call.checked.request.k_scale.of_head(head),
                exact: self.call.checked.request.out.dtype() == Dtype::F32,
                softcap: options.softcap.unwrap_or(0.0),
                scores,
                rescale,
                max: states.max.wrapping_add(first_row),
                sum: states.sum.wrapping_add(first_row),
                acc: states.acc.wrapping_add(first_row * self.shape.value_pad),
            };
            self.attend_head(&mut work, tile, next, head);
        }
    }

    /// Runs the kernel on one head of a tile, in place or on decoded rows.
    fn attend_head(&mut self, work: &mut Tile, tile: &TileRows, next: Option<&TileRows>, head: usize) {
        let request = self.call.checked.request;
        let (key_stride, value_stride) = (request.k_cache.strides()[2], request.v_cache.strides()[2]);
        match self.access {
            Access::InPlace(storage) => {
                work.key_offset = head as isize * key_stride;
                work.value_offset = head as isize * value_stride;
                let last = head + 1 == self.heads.end;
                if let Some(rows) = if last { next } else { Some(tile) } {
                    let head = if last { self.heads.start } else { head + 1 } as isize;
                    work.next_keys = rows.keys.as_ptr();
                    work.next_values = rows.values.as_ptr();
                    work.next_key_offset = head * key_stride;
                    work.next_value_offset = head * value_stride;
                }
                // SAFETY: every pointer of the tile is inside its array (ids were checked, scratch was sized),
                // and the kernels were selected for this processor.
                unsafe { self.kernels.attend(storage)(work) };
            }
            Access::Staged => {
                let (key_pad, value_pad) = (self.shape.key_pad, self.shape.value_pad);
                let keys = self.scratch.staged.reserve(TILE * (key_pad + value_pad));
                let values = keys.wrapping_add(TILE * key_pad);
                self.stage(&request.k_cache, &request.k_scale, tile, &tile.keys, head, keys, key_pad);
                self.stage(&request.v_cache, &request.v_scale, tile, &tile.values, head, values, value_pad);
                let last = tile.num_keys - 1;
                let row = |start: *mut f32, pad: usize, i: usize| {
                    start.wrapping_add(i.min(last) * pad).cast::<u8>()
                };
                let key_rows: [*const u8; TILE] = std::array::from_fn(|i| row(keys, key_pad, i).cast_const());
                let value_rows: [*const u8; TILE] =
                    std::array::from_fn(|i| row(values, value_pad, i).cast_const());
                work.keys = key_rows.as_ptr();
                work.values = value_rows.as_ptr();
                // SAFETY: as above, with rows in the staging buffer.
                unsafe { self.kernels.attend(Storage::F32)(work) };
            }
        }
    }

    /// Decodes the tile's rows of one head to fp32, each padded with zeros to `pad`.
    #[expect(clippy::too_many_arguments, reason = "the same call for keys and for values")]
    fn stage(
        &self,
        cache: &Tensor<4>,
        scale: &KvScale<'_>,
        tile: &TileRows,
        rows: &[*const u8; TILE],
        head: usize,
        target: *mut f32,
        pad: usize,
    ) {
        let (dim, stride) = (cache.shape()[3], cache.strides()[3]);
        for (index, row) in rows.iter().take(tile.num_keys).enumerate() {
            let source = row.wrapping_offset(head as isize * cache.strides()[2]);
            let (block, offset) = tile.slots[index];
            let factor = token_factor(scale, block as usize, offset as usize, head);
            // SAFETY: `target` has room for `TILE` rows of `pad`, and the source row is inside the cache.
            unsafe {
                let line = target.add(index * pad);
                if self.shape.pairs > 0 && cache.has_dense_rows() {
                    (self.kernels.decode_pairs)(source, line, dim);
                } else if cache.has_dense_rows() {
                    (self.kernels.decode_row)(source, line, dim, cache.dtype());
                } else {
                    let read = |i| read_strided(cache.dtype(), source, stride, i);
                    (0..dim).for_each(|i| *line.add(self.shape.place(i)) = read(i));
                }
                line.add(dim).write_bytes(0, pad - dim);
                if factor != 1.0 {
                    (0..dim).for_each(|i| *line.add(i) *= factor);
                }
            }
        }
    }

    /// Writes the outputs, or the partial states from slot `slot` on.
    pub(super) fn store(self, slot: Option<usize>) {
        let group = self.shape.group;
        for (number, head) in self.heads.clone().enumerate() {
            for (index, row) in self.rows.iter().enumerate() {
                for member in 0..group {
                    let at = (number * self.rows.len() + index) * group + member;
                    // SAFETY: `at` is inside; the states of a job's strip and heads are its own.
                    unsafe {
                        let state = self.state(self.total, at);
                        match slot {
                            None => super::write_output(
                                self.call.checked,
                                &self.shape,
                                row.token,
                                head * group + member,
                                &state,
                            ),
                            Some(slot) => {
                                let target = self.call.partials.state(slot + index, head * group + member);
                                *target.max = *state.max;
                                *target.sum = *state.sum;
                                target.acc.copy_from_slice(&state.acc[..self.shape.value_dim]);
                            }
                        }
                    }
                }
            }
        }
    }
}
