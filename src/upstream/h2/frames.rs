//! Which streams are open on a connection, by the frames that really passed.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use rustc_hash::FxHashMap;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
};

/// What a client sends before its first frame.
const PREFACE: usize = 24;
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
/// `END_STREAM` of data and headers, `ACK` of settings.
const FLAG: u8 = 1;

/// The streams of one connection.
#[derive(Debug, Default)]
pub(super) struct Streams {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// We have confirmed the peer's settings.
    is_settled: bool,
    /// The highest that was opened.
    opened: u32,
    /// Those of which an end is open.
    open: FxHashMap<u32, Ends>,
    /// The highest that the peer serves, if it said.
    last: Option<u32>,
}

/// Which ends of a stream are closed.
#[derive(Debug, Default)]
struct Ends {
    ours: bool,
    theirs: bool,
}

/// A connection whose frames are followed.
#[derive(Debug)]
pub(super) struct Followed<S> {
    io: S,
    streams: Arc<Streams>,
    sent: Scanner,
    received: Scanner,
    /// What was written and perhaps not sent.
    unsent: Vec<Frame>,
}

/// Finds the frames in what passes.
#[derive(Debug, Default)]
struct Scanner {
    /// What comes before the next frame.
    skip: usize,
    /// The head of the frame, and the beginning of its payload.
    head: [u8; HEAD + 4],
    have: usize,
    /// What is to come of the payload.
    left: usize,
}

/// What counts of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    /// The first of its payload.
    word: u32,
}

// === impl Streams ===

impl Streams {
    /// Waits until we have confirmed the peer's settings.
    pub(super) async fn settled(&self) {
        self.until(|state| state.is_settled).await;
    }

    /// Waits until a stream was opened.
    pub(super) async fn opened(&self, id: u32) {
        self.until(|state| state.opened >= id).await;
    }

    /// Waits until neither end of a stream is open.
    pub(super) async fn over(&self, id: u32) {
        self.until(|state| !state.open.contains_key(&id)).await;
    }

    /// Whether the peer said that it doesn't serve this stream.
    pub(super) fn is_unserved(&self, id: u32) -> bool {
        self.lock().last.is_some_and(|last| id > last)
    }

    /// Whether the peer takes no more streams.
    pub(super) fn are_last(&self) -> bool {
        self.lock().last.is_some()
    }

    async fn until(&self, is_so: impl Fn(&State) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Enabled before the look, so that a change in between isn't missed.
            changed.as_mut().enable();
            if is_so(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn end(&mut self, id: u32, end: impl FnOnce(&mut Ends)) {
        if let Some(ends) = self.open.get_mut(&id) {
            end(ends);
            if ends.ours && ends.theirs {
                self.open.remove(&id);
            }
        }
    }

    /// A stream counts as open as soon as its head is written, perhaps before it is sent.
    fn written(&mut self, frame: Frame) {
        if frame.kind == HEADERS && frame.stream > self.opened {
            self.opened = frame.stream;
            self.open.insert(frame.stream, Ends::default());
        }
    }

    fn sent(&mut self, frame: Frame) {
        match frame.kind {
            RST_STREAM => drop(self.open.remove(&frame.stream)),
            SETTINGS => self.is_settled = true,
            _ => self.end(frame.stream, |ends| ends.ours = true),
        }
    }

    fn received(&mut self, frame: Frame) {
        match frame.kind {
            RST_STREAM => drop(self.open.remove(&frame.stream)),
            GOAWAY => {
                let last = frame.word & !(1 << 31);
                self.last = Some(self.last.map_or(last, |before| before.min(last)));
                self.open.retain(|stream, _| *stream <= last);
            }
            _ => self.end(frame.stream, |ends| ends.theirs = true),
        }
    }
}

// === impl Followed ===

impl<S> Followed<S> {
    pub(super) fn new(io: S, streams: Arc<Streams>) -> Self {
        Self {
            io,
            streams,
            sent: Scanner { skip: PREFACE, ..Scanner::default() },
            received: Scanner::default(),
            unsent: Vec::new(),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Followed<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        let streams = &this.streams;
        this.received.read(&buf.filled()[before..], |frame| {
            if frame.ends() || matches!(frame.kind, RST_STREAM | GOAWAY) {
                streams.change(|state| state.received(frame));
            }
        });
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Followed<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
        let (streams, unsent) = (&this.streams, &mut this.unsent);
        this.sent.read(&buf[..written], |frame| {
            if frame.kind == HEADERS {
                streams.change(|state| state.written(frame));
            }
            let is_ack = frame.kind == SETTINGS && frame.flags & FLAG != 0;
            if frame.ends() || is_ack || frame.kind == RST_STREAM {
                unsent.push(frame);
            }
        });
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(Pin::new(&mut this.io).poll_flush(cx))?;
        if !this.unsent.is_empty() {
            let unsent = &mut this.unsent;
            this.streams.change(|state| unsent.drain(..).for_each(|frame| state.sent(frame)));
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

// === impl Scanner ===

impl Scanner {
    fn read(&mut self, mut bytes: &[u8], mut found: impl FnMut(Frame)) {
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            if self.have < HEAD {
                let taken = (HEAD - self.have).min(bytes.len());
                self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
                self.have += taken;
                bytes = &bytes[taken..];
                if self.have < HEAD {
                    return;
                }
                let [a, b, c, ..] = self.head;
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
            } else {
                let taken = self.left.min(bytes.len());
                let kept = taken.min(self.head.len() - self.have);
                self.head[self.have..self.have + kept].copy_from_slice(&bytes[..kept]);
                self.have += kept;
                self.left -= taken;
                bytes = &bytes[taken..];
            }
            if self.left == 0 {
                found(Frame::of(&self.head));
                *self = Self::default();
            }
        }
    }
}

impl Frame {
    fn of(head: &[u8; HEAD + 4]) -> Self {
        let [_, _, _, kind, flags, a, b, c, d, e, f, g, h] = *head;
        let stream = u32::from_be_bytes([a & 0x7f, b, c, d]);
        Self { kind, flags, stream, word: u32::from_be_bytes([e, f, g, h]) }
    }

    /// Whether the stream's end is closed by it.
    fn ends(self) -> bool {
        matches!(self.kind, DATA | HEADERS) && self.flags & FLAG != 0
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        bytes.extend([kind, flags]);
        bytes.extend(stream.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn frames_are_found_however_they_are_cut() {
        let bytes = [
            vec![b'P'; PREFACE],
            frame(SETTINGS, 0, 0, &[]),
            frame(HEADERS, 5, 1, b"abcdefg"),
            frame(DATA, 0, 1, b"x"),
            frame(RST_STREAM, 0, 1, &8u32.to_be_bytes()),
            frame(GOAWAY, 0, 0, &[0, 0, 0, 7, 0, 0, 0, 0, 1]),
        ]
        .concat();
        for piece in 1..bytes.len() {
            let mut scanner = Scanner { skip: PREFACE, ..Scanner::default() };
            let mut found = Vec::new();
            for piece in bytes.chunks(piece) {
                scanner.read(piece, |frame| found.push((frame.kind, frame.stream, frame.ends())));
            }
            let wanted = [
                (SETTINGS, 0, false),
                (HEADERS, 1, true),
                (DATA, 1, false),
                (RST_STREAM, 1, false),
                (GOAWAY, 0, false),
            ];
            assert_eq!(found, wanted, "in pieces of {piece}");
        }
    }

    fn is_over(streams: &Streams, id: u32) -> bool {
        streams.over(id).now_or_never().is_some()
    }

    #[tokio::test]
    async fn a_stream_is_over_when_both_ends_are_and_what_closes_ours_was_flushed() {
        let (near, mut far) = duplex(4096);
        let streams = Arc::new(Streams::default());
        let mut io = Followed::new(near, Arc::clone(&streams));
        io.write_all(&[b'P'; PREFACE]).await.unwrap();
        assert!(streams.opened(1).now_or_never().is_none());
        for id in [1, 3, 5, 7, 9] {
            io.write_all(&frame(HEADERS, 4, id, b"h")).await.unwrap();
            assert!(!is_over(&streams, id));
        }
        assert!(streams.opened(9).now_or_never().is_some());

        io.write_all(&frame(RST_STREAM, 0, 1, &[0; 4])).await.unwrap();
        assert!(!is_over(&streams, 1), "written is not sent");
        io.flush().await.unwrap();
        assert!(is_over(&streams, 1));

        io.write_all(&frame(DATA, 1, 3, b"")).await.unwrap();
        io.flush().await.unwrap();
        assert!(!is_over(&streams, 3));
        let answer = [frame(HEADERS, 5, 3, b"h"), frame(RST_STREAM, 0, 5, &[0; 4])].concat();
        far.write_all(&answer).await.unwrap();
        io.read_exact(&mut vec![0; answer.len()]).await.unwrap();
        assert!(is_over(&streams, 3) && is_over(&streams, 5));

        far.write_all(&frame(GOAWAY, 0, 0, &[0, 0, 0, 7, 0, 0, 0, 0])).await.unwrap();
        io.read_exact(&mut [0; 17]).await.unwrap();
        assert!(streams.are_last() && streams.is_unserved(9) && !streams.is_unserved(7));
        assert!(is_over(&streams, 9) && !is_over(&streams, 7));
    }
}
