//! A clock that costs a few nanoseconds to read, for what is measured in microseconds.

use std::time::{Duration, Instant};

/// How long the processor's counter is compared with the system's clock.
const CALIBRATION: Duration = Duration::from_millis(2);

/// Ticks since some moment, and how long one takes.
///
/// The counter of x86-64 processors is read where it runs at one rate whatever the processor does; elsewhere a tick is
/// a nanosecond of the system's clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TickClock {
    began: Instant,
    /// Nanoseconds of a tick times 2^32; `None` where ticks are nanoseconds.
    scale: Option<u64>,
}

impl TickClock {
    /// Makes a clock; takes two milliseconds where there is a counter.
    pub(crate) fn new() -> Self {
        let began = Instant::now();
        Self { began, scale: counter::is_steady().then(|| calibrate(began)) }
    }

    #[inline]
    pub(crate) fn now(&self) -> u64 {
        match self.scale {
            Some(_) => counter::read(),
            None => self.began.elapsed().as_nanos() as u64,
        }
    }

    /// Nanoseconds between two readings.
    #[inline]
    pub(crate) fn nanoseconds(&self, ticks: u64) -> u64 {
        self.scale.map_or(ticks, |scale| ((u128::from(ticks) * u128::from(scale)) >> 32) as u64)
    }
}

/// Nanoseconds of a tick times 2^32.
fn calibrate(began: Instant) -> u64 {
    let (first, start) = read_both(began, counter::read);
    while began.elapsed() < CALIBRATION {
        std::hint::spin_loop();
    }
    let (last, end) = read_both(began, counter::read);
    let ticks = last.wrapping_sub(first).max(1);
    (((end - start).as_nanos() << 32) / u128::from(ticks)) as u64
}

/// A counter and the system's clock at one moment: of a few readings the one that took least, since a thread that loses
/// its processor in between reads the second one late.
fn read_both(began: Instant, counter: impl Fn() -> u64) -> (u64, Duration) {
    let read = |_| {
        let (before, ticks) = (began.elapsed(), counter());
        (began.elapsed() - before, ticks, before)
    };
    let (_, ticks, at) = (1..8).map(read).fold(read(0), |a, b| if b.0 < a.0 { b } else { a });
    (ticks, at)
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use core::arch::x86_64::{__cpuid, _rdtsc};

    /// Whether the counter runs at one rate in every state of the processor (bit 8 of leaf 0x8000_0007).
    pub(super) fn is_steady() -> bool {
        const POWER: u32 = 0x8000_0007;
        // SAFETY: every x86-64 processor has this instruction.
        #[allow(clippy::allow_attributes, unused_unsafe, reason = "safe since Rust 1.93, and 1.90 will do")]
        let (most, power) = unsafe { (__cpuid(0x8000_0000).eax, __cpuid(POWER).edx) };
        most >= POWER && power & (1 << 8) != 0
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: every x86-64 processor has this instruction.
        unsafe { _rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod counter {
    pub(super) fn is_steady() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_pass_as_the_systems_clock_says() {
        let clock = TickClock::new();
        let began = Instant::now();
        let (first, start) = read_both(began, || clock.now());
        std::thread::sleep(Duration::from_millis(50));
        let (last, end) = read_both(began, || clock.now());
        let ratio = clock.nanoseconds(last - first) as f64 / (end - start).as_nanos() as f64;
        assert!((0.98..1.02).contains(&ratio), "{ratio}");
    }
}
