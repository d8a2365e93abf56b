//! Follows the framing of what an HTTP/1 client sends, beside hyper, which doesn't tell all it saw.
//!
//! Two things only the raw bytes show: a head that names both `Content-Length` and
//! `Transfer-Encoding` (hyper drops the first, and the request looks innocent), and the beginning of
//! a head that came behind another request. Bodies are skipped, so this costs a look at each line of
//! a head. Where hyper reads the bytes in another way it refuses them, so nothing here needs to be
//! refused twice.

/// What of a line is needed to know what it says: a name and a number.
const LINE: usize = 64;

/// Where in a client's bytes the next one stands.
#[derive(Debug)]
pub(super) struct Framing {
    place: Place,
    /// The beginning of a line whose end has yet to come.
    line: [u8; LINE],
    len: usize,
    /// Whether more of it came than there was room for.
    is_cut: bool,
    /// Whether it ends in a carriage return so far.
    has_return: bool,
    head: Head,
    /// How many heads have ended.
    heads: u64,
    doubtful: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Head,
    Body(u64),
    ChunkSize,
    Chunk(u64),
    Trailers,
    /// Beyond what can be followed.
    Lost,
}

/// What was seen of the head under way.
#[derive(Clone, Copy, Debug, Default)]
struct Head {
    lines: usize,
    is_chunked: bool,
    has_length: bool,
    length: Option<u64>,
    /// How long the body is was said in a line too long to be read.
    is_unclear: bool,
}

// === impl Framing ===

impl Framing {
    pub(super) fn new() -> Self {
        Self {
            place: Place::Head,
            line: [0; LINE],
            len: 0,
            is_cut: false,
            has_return: false,
            head: Head::default(),
            heads: 0,
            doubtful: None,
        }
    }

    /// The number, from 1, of the first request that said in two ways how long it is, or not so that it can be read.
    pub(super) fn doubtful(&self) -> Option<u64> {
        self.doubtful
    }

    /// Whether a head has begun and not ended.
    pub(super) fn is_in_head(&self) -> bool {
        self.place == Place::Head && (self.head.lines > 0 || !trimmed(self.kept()).is_empty())
    }

    /// Whether a head may follow, and nothing of it has come but line ends.
    pub(super) fn is_between(&self) -> bool {
        self.place == Place::Head && !self.is_in_head()
    }

    /// Whether what has begun is a request line without an end.
    pub(super) fn is_in_first_line(&self) -> bool {
        self.is_in_head() && self.head.lines == 0
    }

    /// Follows the bytes that came next.
    pub(super) fn follow(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match &mut self.place {
                Place::Lost => return,
                Place::Body(left) | Place::Chunk(left) => {
                    let skipped = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= skipped as u64;
                    bytes = &bytes[skipped..];
                    self.place = match self.place {
                        Place::Body(0) => Place::Head,
                        Place::Chunk(0) => Place::ChunkSize,
                        place => place,
                    };
                }
                Place::Head | Place::ChunkSize | Place::Trailers => {
                    let Some(end) = memchr::memchr(b'\n', bytes) else {
                        self.keep(bytes);
                        return;
                    };
                    let (line, rest) = bytes.split_at(end + 1);
                    bytes = rest;
                    let has_return = line.len().checked_sub(2).map(|at| line[at] == b'\r');
                    if self.place == Place::Trailers && !has_return.unwrap_or(self.has_return) {
                        // As hyper has it, this is within a line.
                        self.keep(line);
                    } else if self.len == 0 {
                        self.see(trimmed(&line[..end]), false);
                    } else {
                        self.keep(&line[..end]);
                        let kept = self.line;
                        self.see(trimmed(&kept[..self.len]), self.is_cut);
                        (self.len, self.is_cut, self.has_return) = (0, false, false);
                    }
                }
            }
        }
    }

    fn kept(&self) -> &[u8] {
        &self.line[..self.len]
    }

    fn keep(&mut self, bytes: &[u8]) {
        let size = bytes.len().min(LINE - self.len);
        self.line[self.len..][..size].copy_from_slice(&bytes[..size]);
        self.len += size;
        self.is_cut |= size < bytes.len();
        self.has_return = bytes.last().map_or(self.has_return, |last| *last == b'\r');
    }

    fn see(&mut self, line: &[u8], is_cut: bool) {
        match self.place {
            Place::ChunkSize => self.place = chunk(line),
            Place::Trailers if line.is_empty() => self.place = Place::Head,
            Place::Head if !line.is_empty() => self.head.see(line, is_cut),
            // Line ends in front of a request mean nothing.
            Place::Head if self.head.lines > 0 => self.end_head(),
            _ => {}
        }
    }

    fn end_head(&mut self) {
        let head = std::mem::take(&mut self.head);
        self.heads += 1;
        let is_doubtful = head.is_unclear || (head.is_chunked && head.has_length);
        if is_doubtful && self.doubtful.is_none() {
            self.doubtful = Some(self.heads);
        }
        self.place = match head {
            Head { is_chunked: true, .. } => Place::ChunkSize,
            Head { has_length: false, .. } | Head { length: Some(0), .. } => Place::Head,
            Head { length, .. } => length.map_or(Place::Lost, Place::Body),
        };
    }
}

// === impl Head ===

impl Head {
    fn see(&mut self, line: &[u8], is_cut: bool) {
        self.lines += 1;
        // Most lines say nothing here, and end here.
        if !matches!(line[0], b'c' | b'C' | b't' | b'T') {
            return;
        }
        if field(line, b"transfer-encoding").is_some() {
            self.is_chunked = true;
            self.is_unclear |= is_cut;
        } else if let Some(value) = field(line, b"content-length") {
            self.has_length = true;
            self.is_unclear |= is_cut;
            self.length = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        }
    }
}

fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = line.split_at_checked(name.len())?;
    let value = rest.strip_prefix(b":")?;
    start.eq_ignore_ascii_case(name).then(|| value.trim_ascii())
}

/// What follows the line that announces a chunk.
fn chunk(line: &[u8]) -> Place {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let digits = std::str::from_utf8(&line[..digits]).unwrap_or_default();
    match u64::from_str_radix(digits, 16) {
        Ok(0) => Place::Trailers,
        // With the end of its line.
        Ok(size) => size.checked_add(2).map_or(Place::Lost, Place::Chunk),
        Err(_) => Place::Lost,
    }
}

fn trimmed(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same whether the bytes come at once, one by one, or in threes.
    fn followed(text: &str) -> Framing {
        let states = [text.len().max(1), 1, 3].map(|size| {
            let mut framing = Framing::new();
            text.as_bytes().chunks(size).for_each(|piece| framing.follow(piece));
            framing
        });
        let [first, ..] = &states;
        for state in &states {
            assert_eq!((state.place, state.heads), (first.place, first.heads), "{text:?}");
            assert_eq!(state.doubtful, first.doubtful, "{text:?}");
            assert_eq!(state.is_in_head(), first.is_in_head(), "{text:?}");
        }
        let [first, ..] = states;
        first
    }

    const POST: &str = "POST / HTTP/1.1\r\nHost: a\r\n";

    #[test]
    fn a_head_with_two_lengths_is_found_wherever_it_comes() {
        let both = "content-LENGTH: 5\r\nX: y\r\nTransfer-Encoding: chunked\r\n\r\n";
        let other = "transfer-encoding:chunked\ncontent-length:5\n\n";
        for (before, number) in [
            (String::new(), 1),
            ("\r\n\r\n".to_owned(), 1),
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), 2),
            (format!("{POST}Content-Length: 9\r\n\r\n\r\n\r\nHost:\r\n"), 2),
            (format!("{POST}Content-Length: 0\r\n\r\n"), 2),
            (
                format!(
                    "{POST}Transfer-Encoding: chunked\r\n\r\n00a;x=\"y\"\r\n\r\n\r\n567890\r\n0\r\nContent-Length: 5\r\n\r\n"
                ),
                2,
            ),
        ] {
            for fields in [both, other] {
                let found = followed(&format!("{before}{POST}{fields}")).doubtful();
                assert_eq!(found, Some(number), "{before:?}");
            }
        }
    }

    #[test]
    fn bodies_claim_nothing() {
        let body = "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n";
        let sized = format!("{POST}Content-Length: {}\r\n\r\n{body}", body.len());
        let chunked = format!(
            "{POST}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        for text in [sized, chunked] {
            let framing = followed(&text);
            assert_eq!((framing.doubtful(), framing.heads), (None, 1), "{text:?}");
            assert!(!framing.is_in_head());
        }
    }

    #[test]
    fn a_trailer_ends_where_hyper_lets_it_end() {
        let next = "POST /next HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc";
        let fake = "GET / HTTP/1.1\nContent-Length: 5\nTransfer-Encoding: chunked";
        for trailers in ["\n\r\n", "X: y\n\n", "\n\n", "X: y\nZ\r\n"] {
            let text = format!(
                "{POST}Transfer-Encoding: chunked\r\n\r\n0\r\n{trailers}{fake}\r\n\r\n{next}"
            );
            let framing = followed(&text);
            assert_eq!((framing.doubtful(), framing.heads), (None, 2), "{trailers:?}");
        }
    }

    #[test]
    fn a_length_that_is_too_long_to_be_read_is_doubtful() {
        for padding in ["0".repeat(LINE), " ".repeat(LINE), "\t".repeat(LINE)] {
            let mut framing = Framing::new();
            let head = format!("{POST}Content-Length: {padding}5\r\n\r\n");
            let (first, second) = head.split_at(head.len() - 5);
            framing.follow(first.as_bytes());
            framing.follow(second.as_bytes());
            assert_eq!(framing.doubtful(), Some(1), "{padding:?}");
        }
        // Other fields may be as long as they like.
        let long = format!("{POST}Cookie: {}\r\nContent-Length: 2\r\n\r\nab", "c".repeat(999));
        assert_eq!((followed(&long).doubtful(), followed(&long).heads), (None, 1));
    }

    #[test]
    fn a_head_under_way_is_told_from_stray_line_ends() {
        let whole = format!("{POST}\r\n");
        for (rest, is_in_head, is_in_first_line) in [
            ("", false, false),
            ("\r", false, false),
            ("\r\n", false, false),
            ("G", true, true),
            ("\r\nGET / HTTP/1.1", true, true),
            ("GET / HTTP/1.1\r\n", true, false),
            ("GET / HTTP/1.1\r\nHost: a\r\n\r", true, false),
        ] {
            let framing = followed(&format!("{whole}{rest}"));
            assert_eq!(framing.is_in_head(), is_in_head, "{rest:?}");
            assert_eq!(framing.is_in_first_line(), is_in_first_line, "{rest:?}");
        }
    }

    #[test]
    fn what_cannot_be_followed_is_left_alone() {
        for fields in ["Content-Length: x", "Content-Length: 99999999999999999999"] {
            assert_eq!(followed(&format!("{POST}{fields}\r\n\r\nrest\r\n")).place, Place::Lost);
        }
        for size in ["x", "", "fffffffffffffffff", "ffffffffffffffff"] {
            let text = format!("{POST}Transfer-Encoding: chunked\r\n\r\n{size}\r\nrest\r\n");
            assert_eq!(followed(&text).place, Place::Lost, "{size}");
        }
    }
}
