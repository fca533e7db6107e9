//! Memory that a job works in: aligned to cache lines, kept by each thread between jobs.

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// One cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "reached through the pointer only")] [f32; 16]);

/// A growing buffer of floats whose start is aligned to a cache line. Always initialised memory.
#[derive(Default)]
pub(super) struct FloatBuffer {
    lines: Vec<Line>,
}

impl FloatBuffer {
    /// Room for `len` floats, whatever they hold.
    pub(super) fn reserve(&mut self, len: usize) -> *mut f32 {
        let lines = len.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; 16]));
        }
        self.lines.as_mut_ptr().cast()
    }
}

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct Scratch {
    /// Query rows `[heads, rows, key_dim]`.
    pub(super) query: FloatBuffer,
    /// State over all key ranges of the job, and over one of them: `[heads, rows]` maxima, then sums, then
    /// `[heads, rows, value_dim]`.
    pub(super) total: FloatBuffer,
    pub(super) piece: FloatBuffer,
    /// Scores `[rows, TILE]`, then rescale factors, slopes and distances, `[rows]` each.
    pub(super) rows: FloatBuffer,
    /// First and end of the visible keys, `[rows]`.
    pub(super) visible: Vec<[u32; 2]>,
    /// Decoded keys and values of one tile.
    pub(super) staged: FloatBuffer,
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

/// Calls `work` with this thread's buffers.
pub(super) fn with_scratch<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(work)
}
