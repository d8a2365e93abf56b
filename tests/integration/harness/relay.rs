use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

/// A TCP hop that a test can slow down, deafen or cut.
pub(crate) struct Relay {
    addr: SocketAddr,
    faults: watch::Sender<Faults>,
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
}

impl Relay {
    pub(crate) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let faults = watch::Sender::new(Faults::default());
        let acceptor = tokio::spawn({
            let faults = faults.clone();
            async move {
                while let Ok((near, _)) = listener.accept().await {
                    let faults = faults.subscribe();
                    tokio::spawn(async move { pass(near, target, faults).await.ok() });
                }
            }
        });
        Self { addr, faults, acceptor }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes every connection; new ones are fine.
    pub(crate) fn cut(&self) {
        self.faults.send_modify(|faults| faults.cuts += 1);
    }

    /// Loses every further reply on the connections that are open now. Only [`Relay::cut`] ends that, as a network would.
    pub(crate) fn lose_replies(&self) {
        self.faults.send_modify(|faults| faults.deaf = Some(faults.cuts));
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
) -> io::Result<()> {
    let accepted = faults.borrow().cuts;
    let far = TcpStream::connect(target).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (mut near_read, near_write) = near.into_split();
    let (far_read, mut far_write) = far.into_split();
    let replies = pass_replies(far_read, near_write, faults.clone(), accepted);
    let cut = async { faults.wait_for(|faults| faults.cuts > accepted).await.is_ok() };
    tokio::select! {
        _ = cut => Ok(()),
        done = io::copy(&mut near_read, &mut far_write) => done.map(drop),
        done = replies => done,
    }
}

async fn pass_replies(
    mut from: OwnedReadHalf,
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
