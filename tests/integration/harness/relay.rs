use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

use super::{eventually, within};

/// A TCP hop that a test can slow down, deafen, hold up or cut.
pub(crate) struct Relay {
    addr: SocketAddr,
    faults: watch::Sender<Faults>,
    held: Arc<HeldUp>,
    acceptor: JoinHandle<()>,
}

#[derive(Clone, Copy, Default)]
struct Faults {
    /// Connections accepted under an earlier number are closed.
    cuts: u64,
    /// Connections accepted under this number or an earlier one lose every reply.
    deaf: Option<u64>,
    /// How long each piece of a reply is late.
    delay: Duration,
    /// Connections accepted under this number or an earlier one have every request held up.
    hold: Option<u64>,
    /// New connections are closed at once.
    shut: bool,
}

/// Every connection of which something is held up.
type HeldUp = Mutex<Vec<Arc<Mutex<Held>>>>;

/// What one connection has sent and its target hasn't got yet.
#[derive(Default)]
struct Held {
    bytes: Vec<u8>,
    /// The way on, kept open once the near side is cut.
    far: Option<(OwnedReadHalf, OwnedWriteHalf)>,
}

impl Relay {
    pub(crate) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let faults = watch::Sender::new(Faults::default());
        let held: Arc<HeldUp> = Arc::default();
        let acceptor = tokio::spawn({
            let (faults, held) = (faults.clone(), Arc::clone(&held));
            async move {
                while let Ok((near, _)) = listener.accept().await {
                    let (faults, held) = (faults.subscribe(), Arc::clone(&held));
                    tokio::spawn(async move { pass(near, target, faults, &held).await.ok() });
                }
            }
        });
        Self { addr, faults, held, acceptor }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes every connection; new ones are fine.
    pub(crate) fn cut(&self) {
        self.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Closes every connection, and new ones at once, until [`Relay::reopen`].
    pub(crate) fn shut(&self) {
        self.faults.send_modify(|faults| {
            faults.shut = true;
            faults.cuts += 1;
        });
    }

    pub(crate) fn reopen(&self) {
        self.faults.send_modify(|faults| faults.shut = false);
    }

    /// Loses every further reply on the connections that are open now. Only [`Relay::cut`] ends that, as a network would.
    pub(crate) fn lose_replies(&self) {
        self.faults.send_modify(|faults| faults.deaf = Some(faults.cuts));
    }

    /// Holds up every further request on the connections that are open now. After [`Relay::cut`] they are still under way, until
    /// [`Relay::deliver_held`] or [`Relay::lose_held`].
    pub(crate) fn hold_requests(&self) {
        self.faults.send_modify(|faults| faults.hold = Some(faults.cuts));
    }

    /// Waits until one of these texts is among what is held up.
    pub(crate) async fn wait_held(&self, texts: &[String]) {
        eventually("a request is held up", async || {
            self.held.lock().unwrap().iter().any(|held| {
                let text = String::from_utf8_lossy(&held.lock().unwrap().bytes).into_owned();
                texts.iter().any(|sought| text.contains(sought))
            })
        })
        .await;
    }

    /// Forgets what was held up.
    pub(crate) fn lose_held(&self) {
        self.held.lock().unwrap().clear();
    }

    /// Hands over what was held up on connections that are cut by now, to a Redis; what it replied.
    pub(crate) async fn deliver_held(&self) -> String {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        let mut replies = String::new();
        for held in held {
            eventually("its connection is cut", async || held.lock().unwrap().far.is_some()).await;
            let Held { bytes, far } = std::mem::take(&mut *held.lock().unwrap());
            let (mut from, mut to) = far.unwrap();
            to.write_all(&bytes).await.unwrap();
            // So that the end of the replies is known.
            to.write_all(b"PING\r\n").await.unwrap();
            let mut reply = Vec::new();
            while !reply.ends_with(b"+PONG\r\n") {
                let read = within("a reply to what came late", from.read_buf(&mut reply)).await;
                assert_ne!(read.unwrap(), 0, "closed before the last reply");
            }
            replies.push_str(&String::from_utf8_lossy(&reply));
        }
        replies
    }

    /// Makes every piece of a reply this late.
    pub(crate) fn delay(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
        self.acceptor.abort();
    }
}

async fn pass(
    near: TcpStream,
    target: SocketAddr,
    mut faults: watch::Receiver<Faults>,
    held_up: &HeldUp,
) -> io::Result<()> {
    let accepted = faults.borrow().cuts;
    if faults.borrow().shut {
        return Ok(());
    }
    let far = TcpStream::connect(target).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (near_read, near_write) = near.into_split();
    let (mut far_read, mut far_write) = far.into_split();
    let held = Arc::new(Mutex::new(Held::default()));
    let hold = || {
        held_up.lock().unwrap().push(Arc::clone(&held));
        Arc::clone(&held)
    };
    let requests = pass_requests(near_read, &mut far_write, faults.clone(), accepted, hold);
    let replies = pass_replies(&mut far_read, near_write, faults.clone(), accepted);
    let cut = async { faults.wait_for(|faults| faults.cuts > accepted).await.is_ok() };
    let passed = tokio::select! {
        _ = cut => Ok(()),
        done = requests => done,
        done = replies => done,
    };
    held.lock().unwrap().far = Some((far_read, far_write));
    passed
}

async fn pass_requests(
    mut from: OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    faults: watch::Receiver<Faults>,
    accepted: u64,
    hold: impl Fn() -> Arc<Mutex<Held>>,
) -> io::Result<()> {
    let mut held = None;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        if faults.borrow().hold.is_none_or(|hold| accepted > hold) {
            to.write_all(&buffer[..read]).await?;
        } else {
            let held = held.get_or_insert_with(&hold);
            held.lock().unwrap().bytes.extend_from_slice(&buffer[..read]);
        }
    }
}

async fn pass_replies(
    from: &mut OwnedReadHalf,
    mut to: OwnedWriteHalf,
    faults: watch::Receiver<Faults>,
    accepted: u64,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let Faults { deaf, delay, .. } = *faults.borrow();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if deaf.is_none_or(|deaf| accepted > deaf) {
            to.write_all(&buffer[..read]).await?;
        }
    }
}
