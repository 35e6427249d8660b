//! Who runs first, where several threads want a processor.
//!
//! The kernel lets a thread that has begun to run go on for its slice, whoever wakes up meanwhile, and looks whether that
//! is over with each tick of the clock, some milliseconds apart. A slice of one's own makes it short (EEVDF, Linux 6.12;
//! `sched_setattr(2)`), and gives no larger share.

use std::thread;
use std::time::Duration;

use crate::sys;

/// The shortest slice that the kernel grants.
const SLICE_NANOSECONDS: u64 = 100_000;

const BACKGROUND_NICE: i32 = 10;

/// How long an answer has the processors for itself.
const ANSWER: Duration = Duration::from_millis(1);

/// Lets the calling thread, and those it starts from now on, run in short turns: no request waits long for another one's.
/// Where the kernel does not know of it, all is as before.
pub(crate) fn take_short_turns() {
    let _ = sys::schedule(None, SLICE_NANOSECONDS);
}

/// Lets the calling thread run after those that somebody waits for, in short turns: on a single processor the end of a big
/// branch would otherwise come before the answer that it is gone.
pub(crate) fn stand_back() {
    let _ = sys::schedule(Some(BACKGROUND_NICE), SLICE_NANOSECONDS); // else it runs as before
}

/// Lets whoever waits for this processor run first. Between two steps of what nobody waits for; costs nothing where nobody
/// waits.
pub(crate) fn let_others() {
    thread::yield_now();
}

/// Lets the answer go first to whoever caused what is to be done now: the kernel gives no processor away in the midst of a
/// mount, or of the end of a file system.
pub(crate) fn let_answer_go() {
    thread::sleep(ANSWER);
}
