//! What callers ask of requests that exist already, and of all of them: abort, pause, resume, drain, reset.

use super::Scheduler;
use super::core::Core;
use super::inbox::{Inbox, Message};
use super::request::{Deadline, FinishReason, FinishedRequest, WaitingRequest};
use crate::ids::SequenceId;
use crate::{Error, Result};
use std::sync::Arc;

/// What a [`Scheduler::reset_cache`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheReset {
    /// Blocks that were cached and are free now.
    pub num_evicted: u32,
    /// Running requests that went back to the queue.
    pub num_requeued: u32,
}

impl Scheduler {
    /// Ends a request wherever it is, with all its samples; false if it had ended. A sample other than the first is
    /// ended alone by its own id. From any thread. Its blocks come back in the next `step` or `commit`, which reports
    /// each id that ended; one ended alone before the request has its samples is reported when it has, or has ended.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id that was never issued.
    pub fn abort(&self, id: SequenceId) -> Result<bool> {
        self.check_issued(id)?;
        let mut any = false;
        for id in self.inbox.live_ids(id) {
            if self.inbox.end_id(id) {
                any = true;
                self.inbox.push(Message::End(id, FinishReason::Aborted));
            }
        }
        Ok(any)
    }

    /// Stops a request from the next `step` on; false if it had ended. From any thread. It keeps its place in
    /// time, and its blocks until a request that is not paused needs them. Its deadline goes on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id that was never issued.
    pub fn pause(&self, id: SequenceId) -> Result<bool> {
        self.send_live(id, Message::Pause)
    }

    /// Goes on with a paused request from the next `step` on; false if it had ended. From any thread. One that is
    /// not paused is left as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an id that was never issued.
    pub fn resume(&self, id: SequenceId) -> Result<bool> {
        self.send_live(id, Message::Resume)
    }

    /// Accepts nothing any more; what is kept for sessions and retentions becomes cached; what was accepted goes on, and
    /// ends with reason `drained` when the deadline passes. From any thread. A second call replaces the deadline.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a deadline that is none.
    pub fn drain(&self, deadline: Deadline) -> Result<()> {
        deadline.check()?;
        self.inbox.close();
        self.inbox.push(Message::Drain(deadline));
        Ok(())
    }

    /// Empties the cache of what is not held by requests; what is kept after their end goes too. With `requeue_running`, running and paused requests give their
    /// blocks back first and go to their places in the queue, so that nothing is left.
    ///
    /// # Errors
    /// [`Error::WrongState`] while a step is open, while a request has blocks (unless `requeue_running`), or if
    /// another thread is in the scheduler. Nothing has changed then.
    pub fn reset_cache(&self, requeue_running: bool) -> Result<CacheReset> {
        let mut core = self.enter()?;
        let reset = core.reset_cache(&self.inbox, requeue_running);
        self.publish(&core);
        reset
    }

    fn send_live(&self, id: SequenceId, message: impl Fn(SequenceId) -> Message) -> Result<bool> {
        self.check_issued(id)?;
        let live = self.inbox.live_ids(id);
        live.iter().for_each(|&id| self.inbox.push(message(id)));
        Ok(!live.is_empty())
    }

    pub(super) fn check_issued(&self, id: SequenceId) -> Result<()> {
        if self.inbox.was_issued(id) {
            Ok(())
        } else {
            Err(Error::invalid(format!("request {id} was never issued")))
        }
    }
}

impl Core {
    /// Takes in what other threads asked for since the last call.
    pub(super) fn drain_inbox(&mut self, inbox: &Inbox) -> Result<()> {
        while let Some(message) = inbox.pop() {
            match message {
                Message::Submit(waiting) => self.accept(*waiting),
                Message::End(id, reason) => self.end_request(id, reason, inbox)?,
                Message::Pause(id) => self.note_pause(id),
                Message::Resume(id) => self.note_resume(id),
                Message::Drain(deadline) => {
                    self.kept.release_all();
                    self.draining = Some((deadline, self.moment()));
                }
                Message::CloseSession(number) => self.kept.release_session(number),
            }
        }
        for (id, reason) in std::mem::take(&mut self.late_ends) {
            self.end_request(id, reason, inbox)?;
        }
        Ok(())
    }

    fn accept(&mut self, mut waiting: WaitingRequest) {
        let now = self.moment();
        waiting.progress.arrival_step = now.step;
        waiting.progress.arrival_time = now.seconds;
        self.deadlines.insert(waiting.id, waiting.request.deadline, now);
        self.queue.push(waiting);
    }

    /// Ends a request: at once, unless it runs; then when no open step may touch its blocks.
    fn end_request(&mut self, id: SequenceId, reason: FinishReason, inbox: &Inbox) -> Result<()> {
        if let Some(waiting) = self.queue.remove(id) {
            self.end_waiting(waiting, reason, inbox);
        } else if let Some(waiting) = self.take_paused(id) {
            self.end_waiting(waiting, reason, inbox);
        } else if self.is_carrier(id) {
            self.end_carrier(id, reason, inbox);
        } else if let Some(i) = self.halted.iter().position(|halted| halted.sequence.id == id) {
            let mut sequence = self.halted.remove(i).sequence;
            self.end_running(&mut sequence, reason, None, inbox)?;
        } else if let Some(position) = self.position(id) {
            self.running[position].ending.get_or_insert(reason);
        } else if let Ok(position) = self.parked.binary_search_by_key(&id, |sequence| sequence.id) {
            self.parked[position].ending.get_or_insert(reason);
        } else if let Some(branch) = self.take_carried(id) {
            self.end_waiting(branch, reason, inbox);
        }
        Ok(())
    }

    /// Ends those that a sequence carried which has failed, or fits no more.
    pub(super) fn end_carried(
        &mut self,
        branches: Vec<WaitingRequest>,
        reason: FinishReason,
        detail: Option<&Arc<str>>,
        inbox: &Inbox,
    ) {
        for branch in branches {
            self.end_waiting(branch, reason, inbox);
            if let Some(account) = self.ended.last_mut() {
                account.detail = detail.cloned();
            }
        }
    }

    /// Ends a request that has been taken out of its queue, with all the branches in it.
    pub(super) fn end_waiting(&mut self, mut waiting: WaitingRequest, reason: FinishReason, inbox: &Inbox) {
        for branch in std::mem::take(&mut waiting.branches) {
            self.end_waiting(branch, reason, inbox);
        }
        self.sets.leave(waiting.id);
        super::limits::leave_places(&waiting, &inbox.places);
        self.deadlines.remove(waiting.id, waiting.request.deadline, waiting.progress.arrival());
        let n = waiting.request.n;
        self.report_end(&waiting.account(reason, self.last_step.0), n, inbox);
    }

    /// Ends and reports each id of a request that has not become its `n` samples yet, or of one sequence.
    pub(super) fn report_end(&mut self, account: &FinishedRequest, n: u32, inbox: &Inbox) {
        for branch in 0..n {
            let mut ended = account.of_sample(branch);
            if !inbox.end_id(ended.id) && branch > 0 {
                // Aborted by its own id before.
                (ended.reason, ended.detail) = (FinishReason::Aborted, None);
            }
            self.ended.push(ended);
        }
        inbox.forget_samples(account.id, account.branch);
    }

    /// Ends whatever is past its time.
    pub(super) fn end_overdue(&mut self, inbox: &Inbox) -> Result<()> {
        self.end_kept();
        while let Some(id) = self.deadlines.pop_passed(self.moment()) {
            self.end_request(id, FinishReason::Deadline, inbox)?;
        }
        let Some((deadline, since)) = self.draining else { return Ok(()) };
        if !deadline.has_passed(since, self.moment()) {
            return Ok(());
        }
        let mut ids = self.queue.ids();
        ids.extend(self.paused.values().flat_map(|paused| paused.waiting.ids()));
        ids.extend(self.halted.iter().map(|halted| halted.sequence.id));
        ids.extend(self.running.iter().chain(&self.parked).map(|sequence| sequence.id));
        let halted = self.halted.iter().map(|halted| &halted.sequence);
        let carried =
            self.running.iter().chain(&self.parked).chain(halted).flat_map(|sequence| sequence.branches());
        ids.extend(carried.map(|branch| branch.id));
        ids.sort_unstable();
        for id in ids {
            self.end_request(id, FinishReason::Drained, inbox)?;
        }
        Ok(())
    }

    fn reset_cache(&mut self, inbox: &Inbox, requeue_running: bool) -> Result<CacheReset> {
        if let Some(open) = self.open.front() {
            return Err(Error::WrongState(format!(
                "step {} is open: its blocks are in use; commit or abandon it first",
                open.id
            )));
        }
        let num_running = self.running.len() + self.parked.len() + self.halted.len();
        if num_running > 0 && !requeue_running {
            return Err(Error::WrongState(format!(
                "{} with blocks: wait for the end, or ask to requeue what runs",
                crate::count_of(num_running, "request")
            )));
        }
        self.drain_inbox(inbox)?;
        let mut reset = CacheReset::default();
        while let Some(sequence) = self.running.pop().or_else(|| self.parked.pop()) {
            let mut set = Vec::new();
            for mut sequence in self.with_set(sequence) {
                self.strip(&mut sequence)?;
                let reason = sequence.ending;
                let waiting = sequence.into_waiting(true);
                reset.num_requeued += waiting.ids().count() as u32;
                match reason {
                    Some(reason) => self.end_waiting(waiting, reason, inbox),
                    None => set.push(waiting),
                }
            }
            if let Some(waiting) = WaitingRequest::gather(set) {
                self.queue.push(waiting);
            }
        }
        reset.num_requeued += self.force_out_all()?;
        self.kept.release_all();
        if let Some(index) = &self.index {
            reset.num_evicted = index.evict(u32::MAX);
        }
        Ok(reset)
    }
}
